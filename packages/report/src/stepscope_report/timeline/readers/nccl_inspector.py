"""Reader of the JSON lines that the Inspector plugin of NCCL and RCCL writes: one for each finished call.

A line names a call's communicator, size and duration. It states only when the line was written, which may be
long after the call, so calls are not drawn. The size is that of one rank's part. For a gather, nccl-tests
counts the parts of all ranks.

The layout is that of `plugins/profiler/inspector` of NCCL (format v4.0, June 2026). This
format states no algorithm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from stepscope.errors import RecordError
from stepscope_report.timeline.activity.content import SizedCalls, TraceContent
from stepscope_report.timeline.activity.content_reader import Reading
from stepscope_report.timeline.clocks import is_wall
from stepscope_report.timeline.readers.blocks import read_blocks
from stepscope_report.timeline.readers.chrome import TraceFields
from stepscope_report.timeline.readers.contract import Claim, Event, FoundFile, Notes, Origin, Recording

NO_RECORD = "lines that are no record of NCCL's Inspector"
TIMED_ON_CPU = "collectives that NCCL's Inspector timed on the CPU, not on the device"
NO_TIMES = "NCCL's Inspector says how long calls took, not when: they are in reports alone"
_HEAD = re.compile(rb'\s*\{\s*"header"\s*:\s*\{\s*"id"\s*:')
_LONGEST = 1 << 22
"""Largest size in bytes of a line. A verbose line has about 200 bytes for each of up to 64 channels."""
_KINDS = 4096
"""Number of collectives of different groups and sizes that one file keeps."""
_OF_ONE_RANK = ("AllGather", "ReduceScatter", "All2All")
"""Beginnings of the names of calls whose stated size is the size of one rank's part."""
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 43)]
_Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Us: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]


class _Header(msgspec.Struct, gc=False):
    id: str
    n_ranks: _Ranks
    nnodes: int | None = None
    comm_name: str = "unknown"

    @property
    def group(self) -> str:
        """Name and id of the communicator, because several communicators may share a name."""
        return self.id if self.comm_name == "unknown" else f"{self.comm_name} {self.id}"


class _Metadata(msgspec.Struct, gc=False):
    hostname: str
    pid: int
    dump_timestamp_us: _Us


class _Collective(msgspec.Struct, gc=False, rename=lambda name: f"coll_{name}"):
    msg_size_bytes: _Bytes
    exec_time_us: _Us
    timing_source: str = "unknown"
    op: str = msgspec.field(name="coll", default="")


class _PointToPoint(msgspec.Struct, gc=False, rename=lambda name: f"p2p_{name}"):
    msg_size_bytes: _Bytes
    exec_time_us: _Us
    timing_source: str = "unknown"
    op: str = msgspec.field(name="p2p", default="")


class _Line(msgspec.Struct, gc=False):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _PointToPoint | None = None


_decode = msgspec.json.Decoder(_Line).decode


class InspectedCalls(NamedTuple):
    """Calls of one file."""

    sized: list[SizedCalls]
    lines: int
    written_ns: int | None
    """Unix time in ns at which the first call was written, or None if that is no time of a wall clock."""


class InspectorReader:
    """Files `HOST-pidN.log` of the Inspector plugin. Reports read them by `read_inspected`."""

    name = "nccl_inspector"

    def claims(self, file: FoundFile) -> Claim | None:
        return Claim() if _HEAD.match(file.head()) else None

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        first = next((line for line in map(_decoded, _lines(file.path, Notes())) if line), None)
        if first is None:
            raise RecordError(f"it holds no whole {NO_RECORD.removeprefix('lines that are no ')}")
        at = first.metadata
        return _Unplaced(Origin(clock="realtime", host=at.hostname, pid=at.pid), notes)


class _Unplaced:
    """A file as a recording without events."""

    def __init__(self, origin: Origin, notes: Notes) -> None:
        self.origin = origin
        self._notes = notes

    def events(self) -> Iterator[Event]:
        self._notes.file(NO_TIMES)
        yield from ()

    def close(self) -> None: ...


def read_calls(path: Path, notes: Notes, on_read: Callable[[int], None] | None = None) -> InspectedCalls:
    """Return all calls of a file. Lines that are cut off or are no records are counted in `notes`."""
    sums: dict[tuple[str, str, int, int, int | None], SizedCalls] = {}
    lines, written_us = 0, None
    for text in _lines(path, notes, on_read):
        line = _decoded(text)
        call = None if line is None else line.coll_perf or line.p2p_perf
        if line is None or call is None:
            notes.events(NO_RECORD)
            continue
        lines += 1
        written_us = line.metadata.dump_timestamp_us if written_us is None else written_us
        if call.timing_source not in ("kernel_gpu", "unknown"):
            notes.events(TIMED_ON_CPU)
        header, total = line.header, call.msg_size_bytes
        if call.op.startswith(_OF_ONE_RANK):
            total *= header.n_ranks
        key = call.op, header.group, header.n_ranks, total, header.nnodes
        known = sums.get(key)
        if known is None:
            if len(sums) >= _KINDS:
                continue
            known = sums[key] = SizedCalls(*key[:4], nodes=header.nnodes)
        known.add(call.exec_time_us)
    written_ns = None if written_us is None or not is_wall(written_us * 1000) else written_us * 1000
    return InspectedCalls(list(sums.values()), lines, written_ns)


def read_inspected(path: Path, on_read: Callable[[int], None] | None = None) -> TraceContent:
    """Return the content of a file, without times."""
    notes = Notes()
    sized, lines, written_ns = read_calls(path, notes, on_read)
    empty = Reading(notes).finish(TraceFields(base_ns=written_ns))
    return msgspec.structs.replace(empty, events=lines, sized=sized)


def _decoded(text: bytes) -> _Line | None:
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _lines(path: Path, notes: Notes, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the lines that are not empty, including a last line without its end. A line that is too long is
    yielded in parts, which are no records.
    """
    rest = b""
    for block in read_blocks(path, notes, on_read):
        *lines, rest = (rest + block).split(b"\n")
        yield from filter(bytes.strip, lines)
        if len(rest) > _LONGEST:
            yield rest
            rest = b""
    if rest.strip():
        yield rest
