"""Rows of processes, with the clocks of their traces and recordings, for merges and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from typing import NamedTuple

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo, Sidecar
from stepscope_report.timeline.clocks import MARGIN_NS, OWN_CLOCK, align_owner
from stepscope_report.timeline.model import Process, Timeline
from stepscope_report.timeline.readers.chrome import TraceFields
from stepscope_report.timeline.readers.contract import FoundFile, Notes, Origin, Reader, reason
from stepscope_report.timeline.trace_files import NO_HOST, TraceFile

ROLES = ("trainer", "driver", "agent_loop", "rollout", "env", "reward", "ref", "actor", "critic")
"""Roles in the order of their rows, from the top. Other roles follow by name."""
_SECOND_NS = 1_000_000_000
"""Shortest time in ns from the end of the step to rows of processes without a known clock."""
_BASE_NS = 1000 * _SECOND_NS
"""Stepscope's own bases are multiples of this, in ns. Times since 1970 then keep the last three digits of
their seconds, so that one replacement fits more events."""
_PIDS = 1 << 31
_EXACT = ((0, 1000 << 42), (1 << 52, 1000 << 43))
"""Distances in ns at which Perfetto's trace processor finds every ns of a `ts`.

The processor reads `ts` as a double in us. Doubles are half a ns apart below 2^42 us, and a ns apart below
2^43 us. The processor multiplies the double by 1,000 and rounds. From 2^52 on, the product is a whole number.
Between these ranges (days 50.9 to 52.1), one in four times would be a ns late. A slice that ends together
with its parent would then end after the parent, and Perfetto would not show it."""


class Row(msgspec.Struct, kw_only=True, eq=False):
    """A process, or the traces of a process that could not be aligned."""

    info: ProcessInfo
    process: int | None
    """Index in `Timeline.processes`, or None if the process left neither spans nor a part of the manifest (an
    engine's worker)."""
    clock: Process | None
    """The process whose clock places the row's traces, or None if there is none."""
    unaligned: str | None = None
    """Reason why the row's times cannot be compared with others, or None if they can."""
    shift_ns: int | None = 0
    """Number that is added to the row's times, or None for an unaligned row before its first event, which
    sets the number."""
    name: str = ""
    pid: int = 0
    """Pid in the timeline: the process' own pid if it is free."""
    place: int = 0
    """Position of the row, from 1 at the top."""
    shown: bool = False
    """True if the row's metadata has been written."""
    seen_pid: int | None = None
    """Pid of the process as a trace states it, or None."""

    @property
    def wanted_pid(self) -> int:
        """Preferred pid of the row; 0 if there is none."""
        return max(self.info.pid or self.seen_pid or 0, 0)


class Axis(NamedTuple):
    """The time axis of a merged file: positions are ns since `base_ns`."""

    base_ns: int
    """The origin of positions, at least `MARGIN_NS` before the step: Perfetto drops events at negative
    positions."""
    first: int
    """First plausible position."""
    last: int
    """Last plausible position."""
    behind: int
    """First position for rows that have no place in the step."""

    def shift_of(self, position: int) -> int:
        """Return the shift in ns of an unaligned process' times, of which the first is at `position`.

        Times near the step are not changed. Other times are moved behind the step, so that a reader does not
        take them for times of the step.
        """
        if self.first <= position <= self.last:
            return 0
        return -((position - self.behind) // _SECOND_NS) * _SECOND_NS  # whole seconds: rewritten quickly


def axis_of(timeline: Timeline, bases: Iterable[int] = ()) -> Axis:
    """Return the axis that most traces use already, so that their times need no change.

    Args:
        bases: Bases of the step's traces. A base is replaced by stepscope's own if it is after the step's
            start, or so far away that a viewer cannot show every ns (`_EXACT`).
    """
    start_ns = timeline.window.start_ns - MARGIN_NS
    end_ns = timeline.window.end_ns + MARGIN_NS
    own_ns = start_ns // _BASE_NS * _BASE_NS
    candidates = Counter(
        base_ns
        if any(lowest <= start_ns - base_ns and end_ns - base_ns < beyond for lowest, beyond in _EXACT)
        else own_ns
        for base_ns in bases
    )
    ((base_ns, _),) = candidates.most_common(1) or [(own_ns, 0)]
    end = timeline.window.end_ns - base_ns
    return Axis(base_ns, first=start_ns - base_ns, last=end + MARGIN_NS, behind=end + _SECOND_NS)


class Rows:
    """All rows of one timeline. First ask for the rows of all traces, then call `number`."""

    def __init__(self, timeline: Timeline, axis: Axis) -> None:
        self._timeline = timeline
        self._rows: dict[tuple[object, ...], Row] = {}
        self.of_process = [self._of_process(index, axis) for index in range(len(timeline.processes))]
        self._by_key = {row.info.key: row for row in reversed(self.of_process)}

    def of_chrome(self, trace: TraceFile, fields: TraceFields) -> Row:
        key = None if trace.sidecar is None else trace.sidecar.process
        reason = None if fields.base_ns is not None else OWN_CLOCK
        row = self.of_trace(trace.whose(fields), key, unaligned=reason)
        row.seen_pid = row.seen_pid or fields.pid
        return row

    def of_trace(self, info: ProcessInfo, key: str | None, *, unaligned: str | None) -> Row:
        """Return the row of a trace that `info` wrote.

        Args:
            key: `ProcessInfo.key` of the stepscope process that recorded it.
            unaligned: Reason why its times are not on its host's wall clock, or None if they are.
        """
        known = self._by_key.get(key or "") or self._same_process(info)
        if known is not None and unaligned is None:
            return known
        clock = known.clock if known is not None else clock_of(info.host, self._timeline.processes)
        reason = None if clock is not None else never_measured(info.host)
        if unaligned is not None:
            clock, reason = None, unaligned
        if known is not None:
            info = known.info
        row = Row(info=info, process=None, clock=clock, unaligned=reason, shift_ns=None if reason else 0)
        return self._rows.setdefault((info.role, info.replica, info.rank, info.host, info.pid, reason), row)

    def number(self) -> list[Row]:
        """Number, name and return all rows from top to bottom."""
        rows = sorted([*self.of_process, *self._rows.values()], key=self._order)
        names = names_of([row.info for row in rows if row.unaligned is None])
        aligned = iter(names)
        taken = set[int]()
        for place, row in enumerate(rows, 1):
            row.place = place
            if 0 < row.wanted_pid < _PIDS and row.wanted_pid not in taken:
                row.pid = row.wanted_pid
                taken.add(row.pid)
            row.name = next(aligned) if row.unaligned is None else f"{_short_name(row.info)} (unaligned)"
        for row in rows:
            if row.pid == 0:
                row.pid = next(free for free in count(row.wanted_pid % _PIDS or 1) if free not in taken)
                taken.add(row.pid)
        return rows

    def _of_process(self, index: int, axis: Axis) -> Row:
        process = self._timeline.processes[index]
        row = Row(info=process.info, process=index, clock=process)
        if not process.aligned:
            row.unaligned = never_measured(process.info.host)
            row.shift_ns = axis.shift_of(process.opened_ns - axis.base_ns)
        return row

    def _same_process(self, info: ProcessInfo) -> Row | None:
        rows = (row for row in self.of_process if (row.info.host, row.info.pid) == (info.host, info.pid))
        return next(rows, None)

    def _order(self, row: Row) -> tuple[object, ...]:
        info = row.info
        owner = row.process is not None and self._timeline.processes[row.process].owner
        role = ROLES.index(info.role) if info.role in ROLES else len(ROLES)
        where = (_or_first(info.replica), _or_first(info.rank), info.host, info.pid)
        return not owner, role, info.role, *where, row.unaligned or ""


def never_measured(host: str) -> str:
    return f"the clock of host {host} was not measured against the step's"


def _or_first(number: int | None) -> int:
    return -1 if number is None else number


def clock_of(host: str, processes: Sequence[Process]) -> Process | None:
    """Return the aligned process on `host` with the smallest known uncertainty, or None if there is none."""
    aligned = [
        (process.clock.uncertainty_ns, at, process)
        for at, process in enumerate(processes)
        if process.info.host == host and process.aligned and process.clock.uncertainty_ns is not None
    ]
    return min(aligned)[2] if aligned else None


def offset_at(process: Process, wall_ns: int) -> int:
    """Return the lead in ns of the process' wall clock over the owner's, at `wall_ns` of its clock."""
    clock = process.clock
    opened_wall_ns = process.opened_ns + clock.offset_ns
    if process.closed_ns is None or clock.offset_ns == clock.closing_offset_ns:
        return clock.offset_ns
    lasted_ns = process.closed_ns + clock.closing_offset_ns - opened_wall_ns
    since_ns = min(max(wall_ns - opened_wall_ns, 0), lasted_ns)
    return clock.offset_ns + since_ns * (clock.closing_offset_ns - clock.offset_ns) // max(lasted_ns, 1)


def steady(process: Process) -> bool:
    """Return whether the process' lead over the owner's clock is constant."""
    return process.closed_ns is None or process.clock.offset_ns == process.clock.closing_offset_ns


def names_of(infos: Sequence[ProcessInfo]) -> list[str]:
    """Return a short, unique name for each process: `actor 0`, `rollout replica 1`, or longer with replica,
    pid, host or number.
    """
    names = [_short_name(info) for info in infos]
    for longer in _LONGER:
        count = Counter(names)
        names = [
            name if count[name] == 1 else name + longer(info, number)
            for number, (name, info) in enumerate(zip(names, infos, strict=True))
        ]
    return names


_LONGER: tuple[Callable[[ProcessInfo, int], str], ...] = (
    lambda info, _: "" if info.rank is None or info.replica is None else f" of replica {info.replica}",
    lambda info, _: f" pid {info.pid}",
    lambda info, _: f" on {info.host}",
    lambda _, number: f" #{number}",
)


def _short_name(info: ProcessInfo) -> str:
    if info.rank is not None:
        return f"{info.role} {info.rank}"
    return info.role if info.replica is None else f"{info.role} replica {info.replica}"


class Recorded:
    """A file, its reader, and the rows of its tracks. If the reader raises, there is a note and no row."""

    def __init__(self, reader: Reader, file: FoundFile, role: str) -> None:
        """
        Args:
            role: Role of the processes that recorded the file.
        """
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
            own_clock: True if the file's times turned out not to be a wall clock's, whatever the reader says.
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
    """Return the recorded process. Facts that the sidecar lacks come from the file."""
    artifact = None if sidecar is None else sidecar.artifact
    return ProcessInfo(
        role=role,
        rank=origin.rank if artifact is None or artifact.rank is None else artifact.rank,
        world_size=(None if artifact is None else artifact.world_size) or origin.world_size,
        host=artifact.host if artifact is not None else origin.host or NO_HOST,
        pid=(None if artifact is None else artifact.pid) or origin.pid or 0,
        replica=None if artifact is None else artifact.replica,
    )


def _to_wall(origin: Origin, sidecar: Sidecar | None) -> tuple[Callable[[int], int] | None, str | None]:
    """Return (function from the file's times to unix ns of its host, reason why there is none).

    Both are None if the file's times are already unix ns.
    """
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
