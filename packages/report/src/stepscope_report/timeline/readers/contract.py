"""Readers of other files than Chrome traces: their contract, and the installed ones.

Other packages bring readers by the entry points `stepscope.readers`. An entry point names a class (or
function) that is called without arguments and returns a `Reader`. Merges and reports ask every reader about
every file below a step's `traces`; the first reader that claims a file reads it. If a reader raises, its file
is left out and the error is listed, and the other files are read.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from stepscope.errors import RecordError
from stepscope.files.sidecar import Sidecar
from stepscope.files.storage import open_file
from stepscope_report.timeline.clocks import is_wall, middle
from stepscope_report.timeline.model import FileProblem

GROUP = "stepscope.readers"
_METHODS = ("claims", "open")
Clock: TypeAlias = Literal["realtime", "monotonic", "monotonic_raw", "unknown"]
"""Clock of a recording's times. `realtime`: unix ns of the host's wall clock. `monotonic`, `monotonic_raw`:
ns of that clock of the host, placed by the anchors in the file's sidecar. `unknown`: ns since an unknown
time."""


def clock_of(times_ns: Iterable[int]) -> Clock:
    """Return the clock of times that a file states as unix ns. The clock is `unknown` if most times are
    before the year 2000, else `realtime`. Without any time, it is `realtime`.
    """
    at_ns = middle(times_ns)
    return "realtime" if at_ns is None or is_wall(round(at_ns)) else "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A file below a step's `traces`."""

    path: Path
    name: str
    """Path of the file, relative to the step's folder, with `/`."""
    sidecar: Sidecar | None = None
    """The sidecar of the file, of a parent folder, or of the file from which it was made (`x.nsys-rep` for
    `x.sqlite`). None if the process that wrote the file is unknown."""

    @property
    def kind(self) -> str | None:
        """`Artifact.kind` of the sidecar, or None without a sidecar."""
        return None if self.sidecar is None else self.sidecar.artifact.kind

    def head(self, size: int = 4096) -> bytes:
        """Return the first `size` bytes of the content, decompressed if the file is gzip. Empty if the file
        cannot be read.
        """
        try:
            with open_file(self.path) as file:
                head = file.read(size)
            if head[:2] == b"\x1f\x8b":
                with gzip.open(self.path) as unpacked:
                    return unpacked.read(size)
        except (OSError, EOFError, zlib.error):
            return b""
        return head


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a reader to a file that it knows."""

    read: bool = True
    """False if no reader should read the file."""
    why: str | None = None
    """Reason why the file is not read, with a fix if there is one, for the list of left-out files. None if
    the file is read, or if it has nothing for a timeline and is not listed."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin that a file states before its events; a field is None if not stated. A sidecar overrides it."""

    clock: Clock
    why: str | None = None
    """Reason why the clock is unknown, such as `the export has no session start`; None if the clock is
    known."""
    host: str | None = None
    pid: int | None = None
    """Pid of the recorded process."""
    rank: int | None = None
    world_size: int | None = None
    processes: tuple[int, ...] = ()
    """OS pids of further processes with tracks in the file. Each gets its own row."""


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the timeline. A reader yields a track before the track's first event, and again with a
    better name.

    Tracks of one process with the same name are one track, also across the files that one reader reads.
    """

    track: int
    """Number that the reader gives the track."""
    name: str
    """`Stream 7`, `CANN thread 81`, `NVTX`."""
    pid: int | None = None
    """Pid of its process, one of `Origin.processes`, or None for the recorded process."""
    device: str | None = None
    """`GPU 0`, `NPU 3`: the device that runs the slices, or None if the slices are no work of a device."""
    thread: int | None = None
    """Number of the track's thread if the thread has several tracks (one for calls, one for ranges), else
    None."""
    sort: int = 0
    """Place of the track among the recording's tracks."""
    overlapping: bool = False
    """True if slices of the track may overlap without nesting. The track is then drawn as several lines, and
    its slices must come in the order of their starts."""


class Slice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Event with a duration."""

    track: int
    name: str
    start_ns: int
    dur_ns: int
    category: str | None = None
    """Kineto's category if one fits, else None: `kernel`, `gpu_memcpy`, `gpu_memset`, `cuda_runtime`,
    `cpu_op`, `user_annotation`, `communication`."""
    args: Mapping[str, object] | None = None
    """Arguments by name. A kernel and the call that launched it have the same integer `correlation`."""


class Instant(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Event without a duration."""

    track: int
    name: str
    at_ns: int
    category: str | None = None
    args: Mapping[str, object] | None = None


class Counter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Values of a counter from one moment on. A counter is identified by its process and its name."""

    track: int
    name: str
    at_ns: int
    values: Mapping[str, int | float]
    """Values by name. Each name is drawn as one line."""


class Flow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One end of an arrow between slices, at the slice that runs on the track at that time."""

    track: int
    at_ns: int
    id: int | str
    """Id of any size. It is the same at all ends of the arrow, and unique in the file."""
    point: Literal["start", "step", "end"]
    name: str = "flow"
    category: str | None = None


Event: TypeAlias = Track | Slice | Instant | Counter | Flow


class Notes:
    """Unusable parts of one file: each kind of problem, with the number of affected events."""

    def __init__(self) -> None:
        self.counts: dict[str, int | None] = {}

    def file(self, what: str) -> None:
        """Record a problem of the whole file."""
        self.counts[what] = None

    def events(self, what: str, count: int = 1) -> None:
        self.counts[what] = (self.counts.get(what) or 0) + count


class Recording(Protocol):
    """An open file. Each file is opened once for its origin and once more for its events, and closed each
    time.
    """

    @property
    def origin(self) -> Origin: ...

    def events(self) -> Iterator[Event]:
        """Yield the readable events and note the unreadable ones. Times are ints in ns, of `origin.clock`.

        Memory does not grow with the file, except for names.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Reader(Protocol):
    """Reader of one kind of file. It keeps no state between files, and writes no files."""

    name: str
    """The name in messages."""

    def claims(self, file: FoundFile) -> Claim | None:
        """Return a claim on a file by its sidecar's kind, its name, or its first bytes, or None if the
        reader does not know the file.

        This method is called for every file, so it must be cheap and accept any content.
        """
        ...

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        """Open a claimed file. This must be cheap: events are read later.

        Args:
            notes: Receives the unusable parts of the file, now and while its events are read.

        Raises:
            RecordError: no part of the file can be used. The message gives the reason.
        """
        ...


class Readers:
    """Readers in the order in which they are asked, with the problems of readers that fail.

    Readers of other packages come first, by name, because they know their files better.
    """

    def __init__(self) -> None:
        self._readers: list[Reader] = []
        self.problems: list[FileProblem] = []
        for point in _points(metadata.entry_points, tuple(map(_changed, sys.path))):
            try:
                reader = cast(Callable[[], Reader], point.load())()
                lacking = [name for name in _METHODS if not callable(getattr(reader, name, None))]
                if lacking:
                    raise TypeError(f"{type(reader).__qualname__} lacks {', '.join(lacking)}")
            except Exception as error:
                what = f"this reader ({point.value}) cannot be used: {reason(error)}"
                self.problems.append(FileProblem(file=f"{GROUP}: {point.name}", what=what))
            else:
                self._readers.append(reader)
        # Imported here because both readers import this module.
        from stepscope_report.timeline.readers.nccl_inspector import InspectorReader
        from stepscope_report.timeline.readers.nsys import NsysReader

        self._readers += NsysReader(), InspectorReader()

    def claim(self, file: FoundFile) -> tuple[Reader, Claim] | tuple[None, None]:
        """Return the first reader that claims the file, and its `Claim`; (None, None) if no reader does. A
        reader that raises is skipped and listed in `problems`.
        """
        for reader in self._readers:
            try:
                claim = reader.claims(file)
            except Exception as error:
                what = f"reader {reader.name!r} failed when asked about it: {reason(error)}"
                self.problems.append(FileProblem(file=file.name, what=what))
                continue
            if claim is not None:
                return reader, claim
        return None, None


def undeclared(track: Track) -> ValueError:
    """Return the error of a track whose process the recording does not name."""
    return ValueError(f"track {track.name!r} is of process {track.pid}, which is not in Origin.processes")


@contextmanager
def failure_noted(reader: Reader, notes: Notes) -> Iterator[None]:
    """Turn an exception of a reader into a note, and end the block there."""
    try:
        yield
    except RecordError as error:
        notes.file(str(error))
    except Exception as error:
        notes.file(f"reader {reader.name!r} failed: {reason(error)}; what it gave before is used")


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@lru_cache(1)
def _points(
    entry_points: Callable[..., Iterable[metadata.EntryPoint]], folders: tuple[object, ...]
) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points by name. The search (10 ms) is repeated if one of the `folders` changed."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def _changed(folder: str) -> tuple[str, int | None]:
    """Return a folder of the import path with its time of modification."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, None
