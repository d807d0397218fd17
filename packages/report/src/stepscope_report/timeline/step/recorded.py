"""A recording that a reader reads: the rows of its processes, and its times on their hosts' wall clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo, Sidecar
from stepscope_report.timeline.clocks.align import align_owner
from stepscope_report.timeline.clocks.wall import OWN_CLOCK
from stepscope_report.timeline.readers.blocks import Notes
from stepscope_report.timeline.readers.contract import FoundFile, Origin, Reader
from stepscope_report.timeline.readers.installed import reason
from stepscope_report.timeline.step.rows import Row, Rows


class Recorded:
    """A file, its reader, and the rows of its tracks. If the reader raises, there are no rows but a note."""

    def __init__(self, reader: Reader, file: FoundFile, role: str) -> None:
        """Args: role: Role of the processes that recorded the file."""
        self.reader = reader
        self.file = file
        self.notes = Notes()
        self.role = role
        self.rows: dict[int | None, Row] = {}
        """{`Track.pid`: row}."""
        self.wall: Callable[[int], int] | None = None
        """Function from the file's times to unix ns of its host, or None if no such conversion is needed or
        possible."""
        self._origin: Origin | None = None
        with self._failure_noted():
            with closing(reader.open(file, Notes())) as recording:
                origin = recording.origin
            self._origin = origin

    def place(self, rows: Rows, *, own_clock: bool = False) -> None:
        """Request the rows of the file's processes.

        Args:
            own_clock: True if its times turned out to be of no wall clock, whatever its reader says.
        """
        origin, sidecar = self._origin, self.file.sidecar
        if origin is None:
            return
        with self._failure_noted():
            self.wall, unaligned = _to_wall(origin, sidecar)
            if unaligned is None and own_clock:
                unaligned = OWN_CLOCK
            process = _process_of(origin, sidecar, self.role)
            key = None if sidecar is None else sidecar.process
            main = rows.of_trace(process, key, unaligned=unaligned)
            for pid in origin.processes:
                other = ProcessInfo(role=self.role, rank=None, world_size=None, host=process.host, pid=pid)
                is_main = pid in (process.pid, main.info.pid)
                self.rows[pid] = main if is_main else rows.of_trace(other, None, unaligned=unaligned)
            self.rows[None] = main

    @contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            self.notes.file(f"left out: {error}")
        except Exception as error:
            self.notes.file(f"left out: reader {self.reader.name!r} failed: {reason(error)}")


def _process_of(origin: Origin, sidecar: Sidecar | None, role: str) -> ProcessInfo:
    """Return the recorded process as the sidecar describes it, else as the file does."""
    artifact = None if sidecar is None else sidecar.artifact
    return ProcessInfo(
        role=role,
        rank=origin.rank if artifact is None or artifact.rank is None else artifact.rank,
        world_size=(None if artifact is None else artifact.world_size) or origin.world_size,
        host=artifact.host if artifact is not None else origin.host or "host unknown",
        pid=(None if artifact is None else artifact.pid) or origin.pid or 0,
        replica=None if artifact is None else artifact.replica,
    )


def _to_wall(origin: Origin, sidecar: Sidecar | None) -> tuple[Callable[[int], int] | None, str | None]:
    """Return (function from the file's times to unix ns of its host, reason why there is none)."""
    if origin.clock == "realtime":
        return None, None
    if origin.clock == "unknown":
        return None, origin.why or "the file does not say what its times count from"
    opened = None if sidecar is None else _anchor(sidecar.opened, origin.clock)
    if sidecar is None or opened is None:
        clock = f"CLOCK_{origin.clock.upper()}"
        return None, f"its times are {clock}, and no sidecar says what time it was then"
    return align_owner(opened, _anchor(sidecar.closed, origin.clock)).place, None


def _anchor(anchor: ClockAnchor | None, clock: str) -> ClockAnchor | None:
    if anchor is None or clock == "monotonic":
        return anchor
    return None if anchor.raw_ns is None else msgspec.structs.replace(anchor, mono_ns=anchor.raw_ns)
