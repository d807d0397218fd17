"""Contract of readers of other files than Chrome traces: the entry points `stepscope.readers`.

An entry point names a class (or function) that is called without arguments and gives a `Reader`. The merge
asks every reader about every file below a step's `traces`; the first that claims one reads it. Whatever a
reader raises costs its file and is named; it never ends the merge.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from stepscope.files.sidecar import Sidecar
from stepscope.files.storage.reading import open_file
from stepscope.timeline.readers.blocks import Notes

Clock: TypeAlias = Literal["realtime", "monotonic", "monotonic_raw", "unknown"]
"""Clock of a recording's times: unix ns of its host's wall clock, ns of CLOCK_MONOTONIC or
CLOCK_MONOTONIC_RAW there (placed by the anchors in the file's sidecar), or ns since nobody knows when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A file below a step's `traces`."""

    path: Path
    name: str
    """Relative to the step's folder, with `/`."""
    sidecar: Sidecar | None = None
    """Its own; else that of a folder it lies in, or of the file beside it that it was made from (`x.nsys-rep`
    for `x.sqlite`). None: nothing says who wrote it."""

    @property
    def kind(self) -> str | None:
        """`Artifact.kind`, where a sidecar says it."""
        return None if self.sidecar is None else self.sidecar.artifact.kind

    def head(self, size: int = 4096) -> bytes:
        """Its first bytes, decompressed where it is gzip; as many as can be read."""
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
    """False: no other reader is asked, and nobody reads it."""
    why: str | None = None
    """Why it is not read, with the fix if there is one: it is said of the file among what is left out. None:
    it holds nothing for a timeline, and nobody misses it."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin that a file states before its events. None: not stated; a sidecar takes precedence."""

    clock: Clock
    why: str | None = None
    """Why the clock is unknown: `the export has no session start`."""
    host: str | None = None
    pid: int | None = None
    """Of the process that it is a recording of."""
    rank: int | None = None
    world_size: int | None = None
    processes: tuple[int, ...] = ()
    """OS pids of the further processes that it holds tracks of; each gets a row of its own."""


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the timeline. It comes before the first event on it, and again when it gets a better name.

    Tracks of one process that have one name are one track, also across the files that one reader reads.
    """

    track: int
    """The reader's own number for it."""
    name: str
    """`Stream 7`, `CANN thread 81`, `NVTX`."""
    pid: int | None = None
    """The process it belongs to, one of `Origin.processes`. None: the recorded one."""
    sort: int = 0
    """Its place among the recording's tracks."""
    overlapping: bool = False
    """Slices on it overlap without nesting: it is drawn as several lines. Its slices come in order of their
    start."""


class Slice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that took time."""

    track: int
    name: str
    start_ns: int
    dur_ns: int
    category: str | None = None
    """In Kineto's words where they fit: `kernel`, `gpu_memcpy`, `gpu_memset`, `cuda_runtime`, `cpu_op`,
    `user_annotation`, `communication`."""
    args: Mapping[str, object] | None = None


class Instant(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that took none."""

    track: int
    name: str
    at_ns: int
    category: str | None = None
    args: Mapping[str, object] | None = None


class Counter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Values from this moment on. A counter is its process and its name."""

    track: int
    name: str
    at_ns: int
    values: Mapping[str, int | float]
    """A line for each."""


class Flow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One end of an arrow between slices: of the one that runs on the track at that time."""

    track: int
    at_ns: int
    id: int | str
    """Of any size; the same at all its ends, unique in the file."""
    point: Literal["start", "step", "end"]
    name: str = "flow"
    category: str | None = None


Event: TypeAlias = Track | Slice | Instant | Counter | Flow


class Recording(Protocol):
    """One file, opened: once for its origin, and once more for its events. It is closed each time."""

    @property
    def origin(self) -> Origin: ...

    def events(self) -> Iterator[Event]:
        """Streams what can be read; what cannot is noted. Times are ints in ns, of `origin.clock`.

        Memory does not grow with the file, but for names.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Reader(Protocol):
    """Reads one kind of file. It keeps nothing between files, and writes nothing beside them."""

    name: str
    """For messages."""

    def claims(self, file: FoundFile) -> Claim | None:
        """Return a claim on a file by its sidecar's kind, its name, or its first bytes. None: not its own.

        Asked about every file: cheap, and indifferent to what is in it.
        """
        ...

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        """Opens a file that it claims. Cheap: the events are for later.

        Args:
            notes: What of the file cannot be used goes here, now and while its events are read.

        Raises:
            RecordError: nothing of the file can be used; the message says why.
        """
        ...
