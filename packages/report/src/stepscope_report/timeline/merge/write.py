"""Writing of a merged timeline: the file itself, and the traces of each row."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec

from stepscope.files.storage import temporary
from stepscope_report.timeline.merge import MergedFile
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, JsonEvent, Place, Tracks, row_metadata
from stepscope_report.timeline.merge.reader_events import Drawing
from stepscope_report.timeline.merge.rewrite import Rewriter, Text
from stepscope_report.timeline.model import FileProblem
from stepscope_report.timeline.readers.chrome import ChromeTrace
from stepscope_report.timeline.readers.contract import Notes
from stepscope_report.timeline.rows import Axis, Row

Write: TypeAlias = Callable[[list[JsonEvent]], None]
_GZIP = 31
"""The `wbits` of zlib's functions for a gzip file: 16 more than the 15 bits of its window."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TimelineFile:
    """A timeline that is being written, as gzip or as plain JSON. `finish` closes the JSON."""

    def __init__(self, file: BinaryIO, base_ns: int, *, packed: bool = True) -> None:
        """Begin a timeline in `file`, as gzip if `packed`, else as plain JSON."""
        from isal import isal_zlib  # imported here, because reports import this package and write no timeline

        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = isal_zlib.compressobj(1, isal_zlib.DEFLATED, _GZIP, 9)
        self._sync = isal_zlib.Z_SYNC_FLUSH
        self._file = file
        self._packed = packed
        self.written = 0
        """Size of the file in bytes, as of the last `flush`."""
        self._between = b""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def events(self, text: bytes | memoryview) -> None:
        """Write events as JSON, with commas between them."""
        if text:
            self._put(self._between)
            self._put(text)
            self._between = b",\n"

    def objects(self, events: list[JsonEvent]) -> None:
        self.events(b",\n".join(map(msgspec.json.encode, events)))

    def flush(self) -> int:
        """Write the bytes that the compressor holds back, and return the size of the file."""
        if self._packed:
            self._write(self._deflate.flush(self._sync))
        return self.written

    def finish(self, metadata: object) -> None:
        """End the events and append `metadata` as the field `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        if self._packed:
            self._write(self._deflate.flush())

    def _put(self, text: bytes | memoryview) -> None:
        self._write(self._deflate.compress(text) if self._packed else text)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.written += len(data)


@contextmanager
def full_disk_names(path: Path) -> Iterator[None]:
    """Name the unfinished file in the errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            error.filename = os.fspath(path)
        raise


@contextmanager
def timeline_file(path: Path, base_ns: int) -> Iterator[TimelineFile]:
    """Yield a file that replaces what is at `path` when the block ends without an exception.

    If the block raises, the partial output is removed and the previous file stays.

    Raises:
        OSError: The file cannot be written.
    """
    name = temporary(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with full_disk_names(path), os.fdopen(handle, "wb") as sink:
            yield TimelineFile(sink, base_ns, packed=path.suffix != ".json")
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None:  # the user knows the file by this name
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


class RowTrace(NamedTuple):
    path: Path
    name: str
    """Path of the trace, relative to the step's folder."""
    number: int
    """Number of the trace in the step, which is the prefix of the trace's ids. For a row's first trace it is
    the row's `place`."""
    base_ns: int | None


class RowTraces(NamedTuple):
    """The Chrome traces of a row, in the order in which they are written."""

    row: Row
    traces: tuple[RowTrace, ...]


class Common(NamedTuple):
    """Values that all rows of a merge share."""

    axis: Axis
    cut: Cut
    files: int
    """The highest number of a trace."""
    tracks: Tracks


class RowOutcome(msgspec.Struct):
    """Results of writing traces: their counts, their problems, and what the selection left out."""

    files: list[MergedFile] = []
    problems: list[FileProblem] = []
    left_out: list[str] = []

    def add(self, other: RowOutcome) -> None:
        self.files += other.files
        self.problems += other.problems
        self.left_out += other.left_out


def write_row(
    traces: RowTraces,
    common: Common,
    out: TimelineFile,
    *,
    limit_of: Callable[[TimelineFile], int | None],
    on_read: Callable[[int], None] | None,
    see: Callable[[Text], None] | None = None,
) -> RowOutcome:
    """Write the traces of a row, in their order.

    Args:
        limit_of: Called with `out` before each trace. Returns the file size at which the trace is cut.
        on_read: Called after each read with the number of bytes.
        see: Called with the events before they are written.
    """
    row, outcome = traces.row, RowOutcome()
    for trace in traces.traces:
        file = ChromeTrace(trace.path)
        place = Place(row, trace.base_ns, common.axis)
        ids = FlowIds(trace.number, common.files)
        rewriter = Rewriter(row, place, ids, common.tracks, common.cut, file.notes)
        texts = file.texts(rewriter.rewrite, on_read)
        if see is not None:
            texts = _seen(texts, see)
        outcome.left_out += write_texts(
            trace.name, texts, rewriter, lambda: [row], common.tracks, out, limit_of(out)
        )
        written, crossed = rewriter.written, rewriter.lines.moved
        outcome.files.append(MergedFile(file=trace.name, row=row.pid, events=written, crossing=crossed))
        outcome.problems += noted(trace.name, file.notes)
    return outcome


def _seen(texts: Iterable[Text], see: Callable[[Text], None]) -> Iterator[Text]:
    for text in texts:
        see(text)
        yield text


def write_texts(
    name: str,
    texts: Iterable[Text],
    counts: Rewriter | Drawing,
    rows: Callable[[], list[Row]],
    tracks: Tracks,
    out: TimelineFile,
    limit: int | None,
) -> list[str]:
    """Write the events of a file up to the limit. Return what the limit and the selected time left out.

    Args:
        texts: Batches of events as JSON.
        counts: Counts the written events.
        rows: Returns the rows that have got an event so far.
    """
    left_out = list[str]()
    latest = 0
    for text in texts:
        if limit is not None and out.flush() + latest > limit:
            left_out.append(f"{name}: what follows its first {counts.written} events, for its size")
            break
        if text:
            for row in rows():
                show(row, tracks, out.objects)
            before = out.written
            out.events(text)
            latest = 0 if limit is None else out.flush() - before
    out.objects(tracks.take() + tracks.take_unnamed())
    if counts.outside:
        left_out.append(f"{name}: {counts.outside} events outside the selected time")
    return left_out


def show(row: Row, tracks: Tracks, write: Write) -> None:
    """Write the metadata of the row before its first event."""
    if not row.shown:
        row.shown = True
        write(list(row_metadata(row)))
    write(tracks.take())


def noted(name: str, notes: Notes) -> list[FileProblem]:
    return [FileProblem(file=name, what=what, events=events) for what, events in notes.counts.items()]
