"""*Idle*: time in which a process ran no call, by probable cause.

This file is longer than 500 lines because the numbers of a section, its tables and its charts are read
together.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.files.spans import SERVED
from stepscope_report.accounting import Interval, Label, Pair, bits_of, common_ns, union_ns, walk
from stepscope_report.charts import pick_of_each
from stepscope_report.division import driver_of, intervals_of
from stepscope_report.formatting import LISTED, count, duration, percent_of, say_profiled, starred
from stepscope_report.html import Html, illustrated, legend, section, stacked
from stepscope_report.replicas import find_replicas
from stepscope_report.sections import OVERVIEW, Section
from stepscope_report.sections.breakdown import find_stretches
from stepscope_report.spans import MOVES_WEIGHTS, ROLLOUT, TRANSFER, is_tool, is_transfer, label_of, placed
from stepscope_report.stragglers import matched_calls, unseen_collectives
from stepscope_report.suspects import StepPath, step_path
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import EngineStall, Span, Timeline, TraceActivity
from stepscope_report.timeline.critical_path import Piece

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page

IdleKind: TypeAlias = Literal[
    "rollout", "weight sync", "slowest rank", "other work", "own profiler", "not known"
]


class IdleCause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of idle time: the work on the step's critical path while the process was idle."""

    kind: IdleKind
    """Kind of the cause. `slowest rank`: other processes of the same role still ran a stage that this process
    had run too. `own profiler`: the engine of this replica served nothing while its profiler wrote. `not
    known`: the recording does not show what the step waited for."""
    role: str | None
    stage: str | None
    wall_ns: int


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Busy and idle time of one process. `busy_ns + idle_ns` is the duration of the step."""

    process: str
    role: str
    rank: int | None
    busy_ns: int
    """Time in which the process worked: it ran a span that does not wait and has no child span in another
    process, or its engine ran. Time in which the engine's profiler wrote is not included."""
    idle_ns: int
    causes: Table[IdleCause]
    """Causes of the idle time, the longest first. Their times add up to `idle_ns`."""
    collective_ns: int | None
    """Time in collectives without computation at the same time, from traces. None if no trace has a
    collective."""
    skew_ns: int | None
    """Part of `collective_ns` before the last rank entered. None if the ranks' calls cannot be matched."""
    awaited: str | None = None
    """Name of the process that was last to enter for most of `skew_ns`. None if `skew_ns` is None or 0."""
    awaited_ns: int = 0
    """Part of `skew_ns` that this process spent waiting for `awaited`."""
    profiled: bool = False
    """True if a profiler recorded the process. The profiler makes `busy_ns` longer."""


class _Work(NamedTuple):
    """Kind of work of a span."""

    waiting: bool
    later: bool
    """True if the work is for a later step."""
    driver: bool


_Awaited: TypeAlias = "tuple[str, Label] | None"
"""(role of the working process, label of its work), or None if unknown. The role of the driver (`driver_of`)
is empty here, so that the driver does not count as a rank among other ranks."""


_Kind: TypeAlias = tuple[int, _Work]
"""(index of a process, kind of its work): the meaning of one bit of the mask that `walk` yields."""


def idle_times(
    timeline: Timeline, activities: Sequence[TraceActivity] = (), path: StepPath | None = None
) -> Table[Idle]:
    """Return a row for each process with an aligned clock, in the timeline's order.

    Args:
        activities: Contents of the step's traces, for times in collectives and in passes of engines.
        path: Critical path of the timeline. None to compute it here.
    """
    shift = _Shift(step_path(timeline) if path is None else path, _engine_work(timeline, activities))
    idle, stalled = shift.run(), shift.stalled_ns
    ran: dict[int, set[Label]] = defaultdict(set)
    for span in timeline.spans:
        ran[span.process].add(label_of(span))
    in_collectives = _collectives(activities)
    skews = _skews(activities, timeline.window.start_ns)
    names = [process.name for process in timeline.processes]
    return Table(
        Idle(
            process=process.name,
            role=process.info.role,
            rank=process.info.rank,
            busy_ns=timeline.window.wall_ns - sum(idle[index].values()) - stalled[index],
            idle_ns=sum(idle[index].values()) + stalled[index],
            causes=_causes(idle[index], process.info.role, ran[index], stalled[index]),
            collective_ns=in_collectives.get(index),
            skew_ns=None if index not in skews else min(skews[index].ns, in_collectives.get(index, 0)),
            awaited=names[skews[index].awaited] if index in skews and skews[index].ns else None,
            awaited_ns=min(skews[index].awaited_ns, in_collectives.get(index, 0)) if index in skews else 0,
            profiled=process.profiled,
        )
        for index, process in enumerate(timeline.processes)
        if process.aligned
    )


def _causes(idle: Mapping[_Awaited, int], role: str, ran: set[Label], stalled_ns: int) -> Table[IdleCause]:
    sums: Counter[tuple[IdleKind, Label | None]] = Counter({("own profiler", None): stalled_ns})
    for awaited, ns in idle.items():
        sums[_kind(awaited, role, ran), None if awaited is None else awaited[1]] += ns
    made = [
        IdleCause(
            kind=kind,
            role=None if label is None else label[0],
            stage=None if label is None else label[1],
            wall_ns=ns,
        )
        for (kind, label), ns in sums.items()
        if ns
    ]
    return Table(
        sorted(made, key=lambda cause: (-cause.wall_ns, cause.role or "", cause.stage or "", cause.kind))
    )


def _kind(awaited: _Awaited, role: str, ran: set[Label]) -> IdleKind:
    if awaited is None:
        return "not known"
    runner, label = awaited
    if MOVES_WEIGHTS.search(label[1]):
        return "weight sync"
    if runner == label[0] == role and label in ran:
        return "slowest rank"
    return "rollout" if label[0] in ROLLOUT or is_tool(*label) else "other work"


class _Shift:
    """A walk over the step that attributes the idle time of each process to the work on the critical path."""

    def __init__(self, path: StepPath, engines: Mapping[int, Sequence[Pair]]) -> None:
        """
        Args:
            engines: The stretches in which the engine of a process ran, by process.
        """
        timeline = path.graph.timeline
        self._path = path
        self._timeline = timeline
        self._engines = engines
        self._driver = driver_of(timeline)
        self._runs = Counter[int]()
        """Number of running innermost work spans in each process."""
        self._runs_now = Counter[int]()
        """Number of running innermost work spans for this step, in each process."""
        self._workers = self._workers_now = 0
        """Number of running innermost work spans outside the owners: of all steps, and of this step."""
        self._piece = 0
        """Index of the current piece of the critical path."""
        self._waited = Counter[_Awaited]()
        """{awaited work: ns so far on the critical path}: the waits of a process that was idle all the
        time."""
        self._since: dict[int, Counter[_Awaited]] = {}
        """Value of `_waited` at the time when a process became idle, by process."""
        self._stalls = _stalls_of_processes(timeline)
        self.stalled_ns = Counter[int]()
        """{index of a process: ns in which the process seemed busy while its engine's profiler wrote}."""

    def run(self) -> list[Counter[_Awaited]]:
        """Return for each process, in the timeline's order, its idle time in ns by the awaited work."""
        timeline, window = self._timeline, self._timeline.window
        idle = [Counter[_Awaited]() for _ in timeline.processes]
        intervals, kinds = intervals_of(timeline, range(len(timeline.spans)), self._kind_of)
        transfers, spans = self._transfers(intervals), (1 << len(kinds)) - 1
        of_bit: list[_Kind | int] = [*kinds, *self._engines]
        for bit, stretches in enumerate(self._engines.values(), len(kinds)):
            intervals += (Interval(start_ns, end_ns, None, bit) for start_ns, end_ns in stretches)
        before, transfer = 0, None
        for index in range(len(timeline.processes)):
            self._begin(index)
        for start_ns, end_ns, mask in walk(intervals, window.start_ns, window.end_ns):
            for index in self._turn(of_bit, bits_of(mask ^ before), mask):
                if self._busy(index):
                    self._end(index, idle)
                else:
                    self._begin(index)
            transfer = transfers.get(start_ns, None if before & spans else transfer)
            before = mask
            self._stall(start_ns, end_ns)
            if mask & spans or transfer is None:
                self._wait(start_ns, end_ns)
            else:
                self._waited[transfer] += end_ns - start_ns
        for index in list(self._since):
            self._end(index, idle)
        return idle

    def _kind_of(self, span: Span) -> _Kind:
        work = _Work(span.waits, self._timeline.leaves(span), span.process == self._driver)
        return span.process, work

    def _transfers(self, intervals: Sequence[Interval]) -> dict[int, _Awaited]:
        """Return {start of a stretch in ns: awaited weight transfer}, for each stretch in which no span runs
        because weights are on their way.
        """
        timeline, window = self._timeline, self._timeline.window
        transfers: dict[int, _Awaited] = {}
        for stretch in find_stretches(intervals, window.start_ns, window.end_ns):
            if stretch.before is None or stretch.after is None:
                continue
            before, after = timeline.spans[stretch.before], timeline.spans[stretch.after]
            if is_transfer(label_of(before), label_of(after)):
                runner = timeline.processes[after.process].info.role
                transfers[stretch.start_ns] = runner, (after.role, TRANSFER)
        return transfers

    def _turn(self, kinds: Sequence[_Kind | int], changed: Iterable[int], mask: int) -> set[int]:
        """Count the spans that start and end at one instant. Return the indices of the processes that may
        have become busy or idle.
        """
        touched, workers = set(), (bool(self._workers), bool(self._workers_now))
        for bit in changed:
            kind, sign = kinds[bit], 1 if mask >> bit & 1 else -1
            if isinstance(kind, int):
                self._runs[kind] += sign
                touched.add(kind)
                continue
            process, work = kind
            if not work.waiting:
                self._runs[process] += sign
                self._runs_now[process] += sign * (not work.later)
                self._workers += sign * (not work.driver)
                self._workers_now += sign * (not work.driver and not work.later)
                touched.add(process)
        if self._driver is not None and workers != (bool(self._workers), bool(self._workers_now)):
            touched.add(self._driver)
        return touched

    def _busy(self, index: int) -> bool:
        """Return True if the process with this index works.

        A span of the driver counts as waiting while other processes work for this step.
        """
        if index != self._driver:
            return self._runs[index] > 0
        return bool(
            (self._runs_now[index] and not self._workers_now) or (self._runs[index] and not self._workers)
        )

    def _begin(self, index: int) -> None:
        if index not in self._since:
            self._since[index] = Counter(self._waited)

    def _end(self, index: int, idle: Sequence[Counter[_Awaited]]) -> None:
        since = self._since.pop(index, None)
        if since is not None:
            idle[index].update({awaited: ns - since[awaited] for awaited, ns in self._waited.items()})

    def _stall(self, start_ns: int, end_ns: int) -> None:
        for index, stalls in self._stalls.items():
            if index not in self._since:
                self.stalled_ns[index] += sum(
                    max(0, min(stall.end_ns, end_ns) - max(stall.start_ns, start_ns)) for stall in stalls
                )

    def _wait(self, start_ns: int, end_ns: int) -> None:
        """Attribute the time from `start_ns` to `end_ns` to the pieces of the critical path. Call this method
        in order of time.
        """
        pieces = self._path.pieces
        while start_ns < end_ns:
            while self._piece < len(pieces) and pieces[self._piece].end_ns <= start_ns:
                self._piece += 1
            until_ns, awaited = end_ns, None
            if self._piece < len(pieces):
                piece = pieces[self._piece]
                until_ns, awaited = min(end_ns, piece.end_ns), self._awaited(piece)
            self._waited[awaited] += until_ns - start_ns
            start_ns = until_ns

    def _awaited(self, piece: Piece) -> _Awaited:
        graph = self._path.graph
        span = graph.span_of(piece.node)
        queues = piece.kind == "wait" and span is not None and span.stage == "queue"
        if span is None or not (piece.kind == "work" or queues):
            return None  # nothing waits for a wait, except for requests in an engine's queue
        role = self._timeline.processes[span.process].info.role
        return "" if span.process == self._driver else role, label_of(span)


def _engine_work(timeline: Timeline, activities: Sequence[TraceActivity]) -> dict[int, list[Pair]]:
    """Return {index of a process: stretches in which its engine ran}. The stretches are from the engine's
    passes, or else from spans of its requests, or else from its counter of requests.
    """
    work: dict[int, list[Pair]] = {}
    for replica in find_replicas(timeline, activities):
        passes = [(ran.start_ns, ran.end_ns) for ran in replica.passes]
        served = placed(timeline, (span for span in replica.served if span.stage in SERVED))
        for index in replica.processes:
            if timeline.processes[index].is_replica:
                work[index] = passes or served or replica.held or []
    return work


def _stalls_of_processes(timeline: Timeline) -> dict[int, list[EngineStall]]:
    stalls: dict[int, list[EngineStall]] = {}
    for index, process in enumerate(timeline.processes):
        if process.info.replica is not None and process.info.role in ROLLOUT:
            own = [stall for stall in timeline.stalls if stall.replica == process.info.replica]
            if own:
                stalls[index] = own
    return stalls


def _collectives(activities: Iterable[TraceActivity]) -> dict[int, int]:
    """Return {index of a process: ns in collectives, on the CPU or a device, without computation at the same
    time}. Processes without a collective in their traces are left out.
    """
    times: Counter[int] = Counter()
    for activity in activities:
        content = activity.content
        if activity.process is not None and content.collectives:
            exposed_us = sum(device.exposed_us for device in content.devices)
            times[activity.process] += round(1000 * (content.waiting_us + exposed_us))
    return dict(times)


def collectives_of_sync(timeline: Timeline, activities: Iterable[TraceActivity]) -> dict[str, int]:
    """Return {name of a process: ns in collectives inside the process' own spans of a weight sync}."""
    syncs: dict[int, list[Pair]] = defaultdict(list)
    for span in timeline.spans:
        if MOVES_WEIGHTS.search(span.stage):
            end_ns = timeline.window.end_ns if span.end_ns is None else span.end_ns
            syncs[span.process].append((span.start_ns, end_ns))
    times: Counter[str] = Counter()
    for activity in activities:
        if activity.process in syncs and activity.unaligned is None:
            calls = chain.from_iterable(collective.calls() for collective in activity.content.collectives)
            placed = [(activity.unix_ns(start_us), activity.unix_ns(end_us)) for start_us, end_us in calls]
            times[timeline.processes[activity.process].name] += common_ns(placed, syncs[activity.process])
    return dict(times)


def awaited_rank(rows: Iterable[Idle]) -> tuple[Idle, Idle] | None:
    """Return (process that waited longest in collectives, process that was awaited). None if no single
    process was awaited for half of the wait, or if the awaited process itself waited for at least half as
    long.
    """
    known = {row.process: row for row in rows if row.skew_ns is not None}
    worst = max(known.values(), key=lambda row: row.skew_ns or 0, default=None)
    last = None if worst is None or worst.awaited is None else known.get(worst.awaited)
    if worst is None or last is None or worst.awaited_ns * 2 < (worst.skew_ns or 0):
        return None
    return (worst, last) if (last.skew_ns or 0) * 2 < worst.awaited_ns else None


class _Skew(NamedTuple):
    """Time that one process spent in collectives before the last rank entered."""

    ns: int
    awaited: int
    """Index of the process that was last to enter for the largest part of `ns`; `awaited_ns` is that part."""
    awaited_ns: int


def _skews(activities: Iterable[TraceActivity], since_ns: int) -> dict[int, _Skew]:
    """Return {index of a process: its waits in collectives whose calls can be matched}.

    Waits before `since_ns`, the start of the step, are left out, because they wait for the opening of a
    capture.
    """
    waits: dict[int, dict[int, array[int]]] = defaultdict(lambda: defaultdict(lambda: array("q")))
    """{process: {process that entered last: [start, end, start, ...]}}"""
    for _, _, calls in matched_calls(activity for activity in activities if activity.process is not None):
        for members in calls:
            own = [(start_ns, end_ns, activity.process or 0) for _, start_ns, end_ns, activity in members]
            last_ns, _, awaited = max(own, key=itemgetter(0, 2))
            for start_ns, end_ns, process in own:
                of = waits[process]  # this creates an entry even if the process never waits
                begin_ns = max(start_ns, since_ns)
                if begin_ns < min(last_ns, end_ns):
                    of[awaited].extend((begin_ns, min(last_ns, end_ns)))
    return {process: _skew(process, of) for process, of in waits.items()}


def _pairs(flat: array[int]) -> Iterator[tuple[int, int]]:
    values = iter(flat)
    return zip(values, values, strict=True)


def _skew(process: int, waits: Mapping[int, array[int]]) -> _Skew:
    total_ns = union_ns(chain.from_iterable(map(_pairs, waits.values())))
    longest = ((union_ns(_pairs(flat)), -awaited) for awaited, flat in waits.items())
    awaited_ns, awaited = max(longest, default=(0, -process))
    return _Skew(total_ns, -awaited, awaited_ns)


_COLUMNS = ("process", ">busy", ">idle", ">%", "it probably waited for", "in collectives")
_NOTE = "Causes: the work on the critical path at the time. In collectives: from traces."


def idle_blocks(rows: Sequence[Idle], report: StepReport) -> Iterator[Block]:
    """Yield a row for each process. If there are many, only the most idle process of each role has a row."""
    window_ns = report.breakdown.window_ns
    if not rows or not window_ns:
        return
    roles = grouped(rows, lambda row: row.role).values()
    shown = rows if len(rows) <= LISTED else [max(own, key=lambda row: row.idle_ns) for own in roles]
    note = f"Of {count(len(rows), 'process')}, the most idle of each role." if len(shown) < len(rows) else ""
    yield _table(shown, window_ns, note)


def _table(rows: Sequence[Idle], window_ns: int, note: str) -> TextTable:
    parts = (note, _NOTE, say_profiled(*(row.profiled for row in rows)))
    cells = tuple(_cells(row, window_ns) for row in rows)
    return TextTable("Idle", _COLUMNS, cells, " ".join(filter(None, parts)))


def _cells(row: Idle, window_ns: int) -> tuple[str, ...]:
    times = (duration(row.busy_ns), duration(row.idle_ns), percent_of(row.idle_ns, window_ns))
    return starred(row.process, row.profiled), *times, say_causes(row), say_collectives(row)


def say_causes(row: Idle, most: int = 3) -> str:
    """Return the causes of idle time as text, the longest first: `rollout 2.06 s, slowest rank 196 ms
    (compute_log_prob), others 52.0 ms`.
    """
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for cause in row.causes:
        by_kind[cause.kind][cause.stage or ""] += cause.wall_ns
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind].total())
    parts = []
    for kind in kinds[:most]:
        stages = [stage for stage, _ in by_kind[kind].most_common(1) if stage]
        named = f" ({', '.join(stages)})" if stages and kind in ("slowest rank", "other work") else ""
        parts.append(f"{kind} {duration(by_kind[kind].total())}{named}")
    others_ns = sum(by_kind[kind].total() for kind in kinds[most:])
    return ", ".join([*parts, *([f"others {duration(others_ns)}"] if others_ns else [])])


def say_collectives(row: Idle) -> str:
    """Return the time in collectives as text: `163 ms (128 ms before all were there: actor 3)`. Empty without
    a trace that has collectives.
    """
    if row.collective_ns is None:
        return ""
    if not row.skew_ns:
        return duration(row.collective_ns)
    last = "" if row.awaited is None else f": {row.awaited}"
    return f"{duration(row.collective_ns)} ({duration(row.skew_ns)} before all were there{last})"


DRAWN = 128
"""Largest number of processes of a role with a row each. If there are more, every k-th process and the most
idle processes have a row."""
_KINDS: tuple[IdleKind, ...] = get_args(IdleKind)


def draw_idle(rows: Sequence[Idle], page: Page) -> Iterator[Html]:
    """Yield a bar for each process: busy time, then idle time by cause."""
    window_ns = page.report.breakdown.window_ns
    if not rows or not window_ns:
        return
    key = legend((_class(kind), kind) for kind in ("busy", *_KINDS))
    shown = [rows[at] for at in pick_of_each(rows, lambda row: row.role, lambda row: row.idle_ns, DRAWN)]
    note = ""
    if len(shown) < len(rows):
        note = f"{len(shown):,} of {count(len(rows), 'process')} are shown, and the most idle of each role."
    if unseen := unseen_collectives(page.timeline):
        note += f" {unseen:,} collectives that Python did not call, such as DDP's, have no wait on record."
    block, bars = _table(shown, window_ns, note.lstrip()), [_bar(row, window_ns) for row in shown]
    drawn = illustrated(block, 1, "busy, then what it probably waited for", bars, "idle-table")
    yield section("idle", "Idle, and why", key, drawn, note=block.note)


def _bar(row: Idle, window_ns: int) -> Html:
    parts: Counter[str] = Counter({"busy": row.busy_ns})
    for cause in row.causes:
        parts[cause.kind] += cause.wall_ns
    bars = (
        (_class(kind), parts[kind], f"{row.process}: {kind} {duration(parts[kind])}")
        for kind in ("busy", *_KINDS)
        if parts[kind]
    )
    return stacked(bars, window_ns)


def _class(kind: str) -> str:
    return "k-" + kind.replace(" ", "-")


IDLE = Section(
    name="idle",
    title="Idle",
    compute=lambda sources: idle_times(sources.timeline, sources.activities, sources.path),
    terminal=idle_blocks,
    html=draw_idle,
    page=OVERVIEW,
)
