"""*Long tail*: the trajectories that held the step up, and the calls that they waited for.

This file is longer than 500 lines because the numbers of a section, its tables and its charts are read
together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope_report.accounting import Label, clipped, rank_of, union_ns
from stepscope_report.charts import pack_trajectories
from stepscope_report.division import STALLED, divide_spans
from stepscope_report.formatting import LISTED, count, duration, few, percent_of, starred, the_last, turn
from stepscope_report.html import EMPTY, Colours, Html, draw, illustrated, percent, section, stacked, tag
from stepscope_report.html.timecharts import lanes
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.sections.requests import FEW, TurnTime, turn_times
from stepscope_report.spans import ToolNames, is_tool, label_of, placed, title
from stepscope_report.table import Block, TextTable, grouped
from stepscope_report.timeline import Span, Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page

WORST = 10
LAST = (10, 5, 1)
"""Percentages of the trajectories: the last 10, 5 and 1 % to end. For each, a `Hold` has the time for which
the other trajectories waited."""


class Extreme(msgspec.Struct, frozen=True, kw_only=True):
    """A duration in ns, with the trajectory and the turn that lasted so long."""

    ns: int
    trajectory: str | None
    turn: int | None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of the durations of one stage's calls inside trajectories, by nearest rank: each is the
    duration of one call.
    """

    role: str
    stage: str
    calls: int
    p50_ns: int
    p90_ns: int
    p99: Extreme
    max: Extreme
    name: str | None = None
    """Name of the tool (the span's attribute `name`), or None for stages that are no tools."""

    @property
    def title(self) -> str:
        """Stage with the tool's name, such as `tool search`, or the stage alone."""
        return title(self.stage, self.name)


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one trajectory in one stage, at work or waiting."""

    role: str
    stage: str
    wall_ns: int
    name: str | None = None
    """Name of the tool (the span's attribute `name`), or None for stages that are no tools."""

    @property
    def title(self) -> str:
        """Stage with the tool's name, such as `tool search`, or the stage alone."""
        return title(self.stage, self.name)


class SlowTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    trajectory: str
    wall_ns: int
    """Duration of the trajectory. Without an end: the time until the last sign of life of its process."""
    open: bool
    """True if the trajectory has no recorded end."""
    start_ns: int | None
    """Start in ns after the capture opened. None if the clock of its process is unaligned."""
    consumed_by: int | None
    """Number of the other step that consumes the trajectory. None if this step consumes the trajectory,
    or if no step is known to consume the trajectory."""
    consumed: bool = True
    """True if this step consumes the trajectory."""
    cancelled: bool = False
    policy_version: int | None
    """Version of the weights at the start of the trajectory. None if no span states one."""
    waits: tuple[Wait, ...]
    """Time by stage, the longest first. Time with several stages at once is divided as in the step's account,
    so that the times add up to `wall_ns`."""
    turns: tuple[TurnTime, ...] = ()
    """Time of each turn by the work of its engine. Empty if no engine recorded its passes."""
    profiled: tuple[str, ...] = ()
    """Processes that served the trajectory and were slowed by a profiler, if other processes of their role
    ran without one."""


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a tool that belong to no trajectory, made while trajectories ran."""

    role: str
    stage: str
    calls: int
    running: int
    """Number of trajectories that ran between the first and the last of the calls."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Time for which the other trajectories waited for the last trajectories."""

    percent: int
    trajectories: int
    """Number of the last trajectories: `percent` of all, rounded up."""
    held_ns: int
    """Time in ns from the end of all other trajectories to the end of the last trajectory."""


class Bubble(msgspec.Struct, frozen=True, kw_only=True):
    """Idle replicas in the tail: from the end of the first 90 % of the trajectories to the end of the last
    trajectory.
    """

    replicas: int
    """Number of inference replicas that recorded work of role `rollout`. Processes that only call a replica
    are not counted."""
    tail_ns: int
    idle_ns: int
    """Idle time of the replicas in the tail, added up. At most `replicas * tail_ns`."""
    in_flight_before: float
    """Mean number of trajectories that ran at once before the tail."""
    in_flight: float
    """Mean number of trajectories that ran at once in the tail."""


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of this step that were already running when its capture opened."""

    trajectories: int
    until_ns: int
    """Time from the opening of the capture until the last of these trajectories ended, or gave its last sign
    of life."""
    last: str
    """Name of the last of these trajectories."""


class LongTail(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int
    """Number of ended trajectories that this step consumes."""
    open: int
    """Number of trajectories of this step without a recorded end."""
    of_other_steps: int
    """Number of trajectories that this step does not consume. They are in no other number here."""
    under_way: int
    """Number of further trajectories that began before the capture opened, so that their durations are
    unknown."""
    spreads: tuple[Spread, ...]
    """Percentiles of the durations: first of trajectories, then of turns, then of the stages inside, by total
    time."""
    last: int
    """Number of trajectories in the last tenth to end, rounded up."""
    held_ns: int | None
    """Time in ns from the end of the first nine tenths of the trajectories to the end of the last tenth. None
    with fewer than two trajectories."""
    rollout_ns: int | None
    """Time from the start of the first trajectory to the end of the last. None if no trajectory ended."""
    holds: tuple[Hold, ...]
    """Time for which the other trajectories waited for the last 10, 5 and 1 %. Empty with fewer than two
    trajectories. 5 % or 1 % is left out if it is as many trajectories as the next larger percentage."""
    bubble: Bubble | None
    """Idle replicas in the tail. None with fewer than two trajectories."""
    worst: tuple[SlowTrajectory, ...]
    late: Late | None = None
    """Trajectories of this step that began before the capture opened, or None if there are none."""
    consumed: int = 0
    """Number of trajectories that `consume` named in this step."""
    consumed_before: int = 0
    """Number of consumed trajectories without a call in this step: they ended before the step, or their
    record is lost."""
    profiled: tuple[str, ...] = ()
    """Processes that served trajectories and were slowed by a profiler, if other processes of their role ran
    without a profiler. The trajectories of these processes took longer."""
    last_profiled: int = 0
    """Number of trajectories among the last tenth that were served by processes in `profiled`."""
    cancelled: int = 0
    """Number of cancelled trajectories. They are in no other number here."""
    cancelled_after_ns: int = 0
    """Time from the end of the last trajectory that was not cancelled to the end of the last cancelled
    trajectory. 0 if the cancelled trajectory ended first, or if there is none."""
    outside: tuple[Outside, ...] = ()
    stalled_ns: int = 0
    """Part of `held_ns` in which the last trajectory waited for an engine whose own profiler started or
    wrote."""


def step_long_tail(timeline: Timeline) -> LongTail | None:
    """Return the long tail of the step, or None if no span belongs to a trajectory."""
    members: dict[str, list[int]] = defaultdict(list)
    kinds: dict[Label, list[Span]] = defaultdict(list)
    names = ToolNames(timeline)
    for index, span in enumerate(timeline.spans):
        if span.trajectory is not None:
            members[span.trajectory].append(index)
            if span.dur_ns is not None and not span.cancelled and not timeline.leaves(span):
                kinds[names.label_of(span)].append(span)
    if not members:
        return None
    roots = [i for indices in members.values() for i in indices if timeline.spans[i].stage == "trajectory"]
    cancelled = [timeline.spans[index] for index in roots if timeline.spans[index].cancelled]
    own = [
        span
        for span in (timeline.spans[index] for index in roots)
        if timeline.consumes(span) and not span.cancelled
    ]
    ended = [span for span in own if span.end_ns is not None]
    finished = [span for span in ended if timeline.processes[span.process].aligned]
    finished.sort(key=lambda span: span.end_ns or 0)
    ends = [span.end_ns or 0 for span in finished]
    holds, last = tuple(_holds(ends)), -(-len(ends) // 10)
    held_ns = holds[0].held_ns if holds else None
    slowed = _slowed(timeline, members)
    latest = finished[len(finished) - last :]
    return LongTail(
        trajectories=len(ended),
        open=len(own) - len(ended),
        of_other_steps=len(roots) - len(own) - len(cancelled),
        under_way=len(members.keys() - {timeline.spans[index].trajectory for index in roots}),
        spreads=_spreads(kinds, names),
        last=last,
        held_ns=held_ns,
        rollout_ns=ends[-1] - min(span.start_ns for span in finished) if ends else None,
        holds=holds,
        bubble=_bubble(timeline, finished) if len(finished) > 1 else None,
        worst=_slowest_of(timeline, _worst(timeline, roots), members, slowed, names),
        late=_late(timeline, roots),
        consumed=len({mark.trajectory for mark in timeline.consumed if mark.step == timeline.step}),
        consumed_before=len((timeline.taken or set()) - members.keys()),
        profiled=tuple(dict.fromkeys(name for names in slowed.values() for name in names)),
        last_profiled=sum((span.trajectory or "") in slowed for span in latest),
        cancelled=len(cancelled),
        cancelled_after_ns=_after_ns(timeline, ends, cancelled),
        outside=_outside(timeline, [timeline.spans[index] for index in roots]),
        stalled_ns=_stalled_ns(timeline, members, latest[-1:], held_ns or 0),
    )


def _after_ns(timeline: Timeline, ends: Sequence[int], cancelled: Iterable[Span]) -> int:
    """Return the time from the last of `ends` (ascending, in ns) to the end of the last cancelled trajectory,
    at least 0.
    """
    last_ns = max((end_ns for _, end_ns in placed(timeline, cancelled)), default=0)
    return max(0, last_ns - ends[-1]) if ends else 0


def _outside(timeline: Timeline, roots: Iterable[Span]) -> tuple[Outside, ...]:
    """Return the calls of tools that belong to no trajectory and began while trajectories ran."""
    running = placed(timeline, roots)
    from_ns = min((start_ns for start_ns, _ in running), default=0)
    until_ns = max((end_ns for _, end_ns in running), default=0)
    calls = grouped(
        (
            span
            for span in timeline.spans
            if span.trajectory is None
            and timeline.processes[span.process].aligned
            and is_tool(span.role, span.stage)
            and from_ns <= span.start_ns < until_ns
        ),
        label_of,
    )
    return tuple(
        Outside(
            role=role,
            stage=stage,
            calls=len(spans),
            running=len(
                clipped(
                    running,
                    min(span.start_ns for span in spans),
                    max(timeline.until_ns(span) for span in spans),
                )
            ),
        )
        for (role, stage), spans in sorted(calls.items())
    )


def _stalled_ns(
    timeline: Timeline, members: Mapping[str, list[int]], last: Sequence[Span], held_ns: int
) -> int:
    """Return the ns in which the last trajectory waited for an engine's own profiler, within the last
    `held_ns` of the trajectory.
    """
    if not (last and held_ns and timeline.stalls):
        return 0
    end_ns = last[0].end_ns or 0
    shares = divide_spans(timeline, members[last[0].trajectory or ""], end_ns - held_ns, end_ns)
    return shares.wall_ns[STALLED]


def _slowed(timeline: Timeline, members: Mapping[str, list[int]]) -> dict[str, tuple[str, ...]]:
    """Return {trajectory: names of the processes that served the trajectory and were slowed by a profiler}.

    A process counts only if other processes of its role served trajectories without a profiler.
    """
    served: dict[str, set[int]] = {
        name: {timeline.spans[index].process for index in indices} for name, indices in members.items()
    }
    by_role: dict[str, set[bool]] = defaultdict(set)
    for index in set().union(*served.values()):
        process = timeline.processes[index]
        by_role[process.info.role].add(process.profiled)
    slowed = {
        index
        for index, process in enumerate(timeline.processes)
        if process.profiled and len(by_role[process.info.role]) > 1
    }
    return {
        name: tuple(timeline.processes[index].name for index in sorted(indices & slowed))
        for name, indices in served.items()
        if indices & slowed
    }


def _late(timeline: Timeline, roots: Sequence[int]) -> Late | None:
    begun = {timeline.spans[index].trajectory for index in roots}
    ends_ns: dict[str, int] = {}
    for span in timeline.spans:
        name = span.trajectory
        if name is None or name in begun or timeline.leaves(span):
            continue
        if timeline.processes[span.process].aligned:
            ends_ns[name] = max(ends_ns.get(name, 0), timeline.until_ns(span) - timeline.window.start_ns)
    last = max(ends_ns, key=lambda name: (ends_ns[name], name), default=None)
    return None if last is None else Late(trajectories=len(ends_ns), until_ns=ends_ns[last], last=last)


def _spreads(kinds: Mapping[Label, Sequence[Span]], names: ToolNames) -> tuple[Spread, ...]:
    order = {"trajectory": 0, "turn": 1}
    total_ns = {label: sum(span.dur_ns or 0 for span in spans) for label, spans in kinds.items()}
    labels = sorted(kinds, key=lambda label: (order.get(label[1], 2), -total_ns[label], label))
    return tuple(
        _spread(label[0], *names.parts(label), sorted(kinds[label], key=lambda span: span.dur_ns or 0))
        for label in labels
    )


def _spread(role: str, stage: str, name: str | None, ascending: Sequence[Span]) -> Spread:
    p50, p90, p99, longest = (
        _extreme(ascending[rank_of(percent, len(ascending))]) for percent in (50, 90, 99, 100)
    )
    return Spread(
        role=role,
        stage=stage,
        name=name,
        calls=len(ascending),
        p50_ns=p50.ns,
        p90_ns=p90.ns,
        p99=p99,
        max=longest,
    )


def _extreme(span: Span) -> Extreme:
    return Extreme(ns=span.dur_ns or 0, trajectory=span.trajectory, turn=span.turn)


def _holds(ends: Sequence[int]) -> Iterator[Hold]:
    before = len(ends)
    for part in LAST:
        last = -(-len(ends) * part // 100)
        if last < before:
            yield Hold(percent=part, trajectories=last, held_ns=ends[-1] - ends[-last - 1])
        before = last


def _bubble(timeline: Timeline, finished: Sequence[Span]) -> Bubble:
    start_ns, until_ns = min(span.start_ns for span in finished), finished[-1].end_ns or 0
    from_ns = finished[-1 - -(-len(finished) // 10)].end_ns or 0
    replicas = {at for at, process in enumerate(timeline.processes) if process.aligned and process.is_replica}
    served = (span for span in timeline.spans if span.role == "rollout" and span.process in replicas)
    worked = {
        index: clipped(placed(timeline, (span for span in own if not span.waits)), from_ns, until_ns)
        for index, own in grouped(served, lambda span: span.process).items()
    }
    tail_ns = until_ns - from_ns
    return Bubble(
        replicas=len(worked),
        tail_ns=tail_ns,
        idle_ns=sum(tail_ns - union_ns(pairs) for pairs in worked.values()),
        in_flight_before=_in_flight(finished, start_ns, from_ns),
        in_flight=_in_flight(finished, from_ns, until_ns),
    )


def _in_flight(spans: Sequence[Span], start_ns: int, end_ns: int) -> float:
    shared = (min(span.end_ns or 0, end_ns) - max(span.start_ns, start_ns) for span in spans)
    return round(sum(ns for ns in shared if ns > 0) / max(end_ns - start_ns, 1), 2)


def _worst(timeline: Timeline, roots: Sequence[int]) -> list[int]:
    """Return the indices of the longest trajectories: first trajectories that this step consumes, then other
    trajectories.
    """

    def place(index: int) -> tuple[bool, int, int]:
        span = timeline.spans[index]
        return not timeline.consumes(span), span.start_ns - timeline.until_ns(span), index

    return sorted(roots, key=place)[:WORST]


def _slowest_of(
    timeline: Timeline,
    worst: Sequence[int],
    members: Mapping[str, list[int]],
    slowed: Mapping[str, tuple[str, ...]],
    names: ToolNames,
) -> tuple[SlowTrajectory, ...]:
    turns = turn_times(timeline, [timeline.spans[index].trajectory or "" for index in worst])
    return tuple(_slow(timeline, index, members, slowed, names, turns) for index in worst)


def _slow(
    timeline: Timeline,
    root: int,
    members: Mapping[str, list[int]],
    slowed: Mapping[str, tuple[str, ...]],
    names: ToolNames,
    turns: Mapping[str, tuple[TurnTime, ...]],
) -> SlowTrajectory:
    span = timeline.spans[root]
    until_ns = timeline.until_ns(span)
    consumed = timeline.consumes(span)
    name = span.trajectory or ""
    shares = divide_spans(timeline, members[name], span.start_ns, until_ns, names)
    return SlowTrajectory(
        trajectory=name,
        wall_ns=until_ns - span.start_ns,
        open=span.end_ns is None,
        start_ns=timeline.since_opening_ns(span),
        consumed_by=None if consumed or span.step == timeline.step else span.step,
        consumed=consumed,
        cancelled=span.cancelled,
        policy_version=span.policy_version,
        waits=_waits(shares.wall_ns, names),
        turns=turns.get(name, ()),
        profiled=slowed.get(name, ()),
    )


def _waits(wall_ns: Counter[Label], names: ToolNames) -> tuple[Wait, ...]:
    return tuple(
        Wait(role=label[0], stage=stage, name=name, wall_ns=ns)
        for label, ns in wall_ns.most_common()
        for stage, name in [names.parts(label)]
    )


def long_tail_blocks(tail: LongTail | None, report: StepReport) -> Iterator[Block]:
    """Yield the percentiles of each stage inside trajectories, and the slowest trajectories."""
    if tail is None:
        return
    yield _spread_table(tail)
    if tail.worst:
        yield _slowest_table(tail.worst)
        yield from _turn_tables(tail.worst)


def _spread_table(tail: LongTail) -> TextTable:
    columns = ("role", "stage", ">calls", ">p50", ">p90", ">p99", ">max", "p99 is", "max is")
    rows = tuple(map(_said_spread, tail.spreads))
    return TextTable("Long tail", columns, rows, "\n".join(tail_sentences(tail)))


def _slowest_table(worst: Sequence[SlowTrajectory]) -> TextTable:
    rows = tuple((*slow_cells(slow), waits(slow)) for slow in worst)
    return TextTable("Slowest trajectories", ("trajectory", ">took", ">began at", "of that"), rows)


def _said_spread(spread: Spread) -> tuple[str, ...]:
    times = (spread.p50_ns, spread.p90_ns, spread.p99.ns, spread.max.ns)
    named = (turn(extreme.trajectory, extreme.turn) for extreme in (spread.p99, spread.max))
    return spread.role, spread.title, f"{spread.calls:,}", *map(duration, times), *named


def slow_cells(slow: SlowTrajectory) -> tuple[str, str, str]:
    """Return the name, the duration and the start of a slow trajectory, as text."""
    took = duration(slow.wall_ns) + (" (open)" if slow.open else " (cancelled)" if slow.cancelled else "")
    return name_slow(slow), took, duration(slow.start_ns)


def waits(slow: SlowTrajectory) -> str:
    """Return the four stages with most of the trajectory's time, as text."""
    return ", ".join(f"{wait.title} {duration(wait.wall_ns)}" for wait in slow.waits[:4])


_TURNS = (
    "turn", ">took", ">queued", ">prefill", ">alone", f">under {FEW}", ">more", ">held up", ">preempted",
    ">outside", ">tokens",
)  # fmt: skip
TURNS_NOTE = (
    f"alone, under {FEW}, more: decoding with that many requests in the pass. held up: the engine served "
    "others. outside: time outside of the engine."
)


def _turn_tables(worst: Iterable[SlowTrajectory]) -> Iterator[TextTable]:
    """Yield the table of the slowest trajectories' turns, if passes were recorded for a turn. Columns in
    which all values are 0 are left out.
    """
    rows = list(_turn_rows(worst))
    if rows:
        kept = [at for at, column in enumerate(zip(*rows, strict=True)) if set(column) != {"0"}]
        cells = tuple(tuple(row[at] for at in kept) for row in rows)
        columns = tuple(_TURNS[at] for at in kept)
        yield TextTable("Turns of the slowest trajectories", columns, cells, TURNS_NOTE, "turn")


def _turn_rows(worst: Iterable[SlowTrajectory]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each turn of the slowest trajectories."""
    for slow in worst:
        for own in slow.turns:
            engine = own.engine
            times = (
                engine.queued_ns, engine.prefill_ns, engine.alone_ns, engine.few_ns, engine.many_ns,
                engine.held_ns, engine.preempted_ns, own.outside_ns,
            )  # fmt: skip
            name = turn(slow.trajectory, own.turn)
            yield name, duration(own.wall_ns), *map(duration, times), f"{own.tokens:,}"


def name_slow(slow: SlowTrajectory) -> str:
    """Return the name of a slow trajectory: `t7`, or `t7*, for step 9`. A `*` marks a trajectory that was
    served by a process in `LongTail.profiled`.
    """
    name = starred(slow.trajectory, bool(slow.profiled))
    if slow.consumed:
        return name
    return f"{name}, not consumed" if slow.consumed_by is None else f"{name}, for step {slow.consumed_by}"


def tail_sentences(tail: LongTail) -> list[str]:
    """Return sentences on the tail, the idle replicas, further trajectories, calls outside of trajectories,
    and processes slowed by a profiler, in this order. Sentences without a fact are left out.
    """
    sentences = (_say_held(tail), _say_bubble(tail), _say_others(tail), _say_outside(tail), _say_slowed(tail))
    return [sentence for sentence in sentences if sentence]


def _say_held(tail: LongTail) -> str:
    """Return a sentence on how long the other trajectories waited for the last trajectories. Empty if
    unknown.
    """
    if tail.held_ns is None or tail.rollout_ns is None:
        return ""
    share = percent_of(tail.held_ns, tail.rollout_ns)
    fewer = [f"{duration(hold.held_ns)} for the last {hold.trajectories:,}" for hold in tail.holds[1:]]
    return (
        f"The others waited {duration(tail.held_ns)} for {the_last(tail.last, tail.trajectories)} "
        f"trajectories: {share} % of the {duration(tail.rollout_ns)} from the first start to the last end."
        f"{' Of that, ' + ', '.join(fewer) + '.' if fewer else ''}{_say_stalled(tail)}"
    )


def _say_stalled(tail: LongTail) -> str:
    if not tail.stalled_ns:
        return ""
    return f" For {duration(tail.stalled_ns)} of that an engine served nothing, because its profiler wrote."


def _say_bubble(tail: LongTail) -> str:
    """Return a sentence on the work of the replicas in the tail. Empty if no replica is known."""
    bubble = tail.bubble
    if bubble is None or not bubble.replicas:
        return ""
    share = percent_of(bubble.idle_ns, bubble.tail_ns * bubble.replicas)
    replicas = count(bubble.replicas, "replica")
    idle = f"{replicas} did nothing for {duration(bubble.idle_ns)} in total ({share} %)"
    return (
        f"Meanwhile {trajectories(bubble.in_flight)} ran at once ({bubble.in_flight_before:g} before), and "
        f"{idle if bubble.idle_ns else f'{replicas} had work all the time'}."
    )


def _say_others(tail: LongTail) -> str:
    """Return a sentence that counts the trajectories outside of `LongTail.trajectories`. Empty if there are
    none.
    """
    late = tail.late
    last = (
        "" if late is None else f"; the last of this step, {late.last}, ran until {duration(late.until_ns)}"
    )
    others = (
        (tail.under_way, f"begun before the capture opened (duration unknown{last})"),
        (tail.of_other_steps, "not consumed by this step"),
        (tail.consumed_before, "consumed without a call in this step (ended before it, or not recorded)"),
        (tail.cancelled, f"cancelled{_after(tail)}"),
        (tail.open, "without a recorded end"),
    )
    parts = [f"{number:,} {what}" for number, what in others if number]
    return f"Further trajectories: {', '.join(parts)}." if parts else ""


def _after(tail: LongTail) -> str:
    late_ns = tail.cancelled_after_ns
    return f" (the last one {duration(late_ns)} after all others had ended)" if late_ns else ""


def _say_outside(tail: LongTail) -> str:
    """Return a sentence that names the tools called outside of trajectories. Empty if there are none."""
    calls = [
        f"{count(own.calls, 'call')} of {own.role} {own.stage}, while {count(own.running, 'trajectory')} ran"
        for own in tail.outside
    ]
    fix = "Call `attach(carrier())` in their thread or process to make them a part of one."
    return f"In no trajectory: {few(calls, LISTED)}. {fix}" if calls else ""


def _say_slowed(tail: LongTail) -> str:
    """Return a sentence that names the processes slowed by a profiler. Empty if no process or every process
    of a role was slowed.
    """
    if not tail.profiled:
        return ""
    names = few(tail.profiled, LISTED)
    return f"*: served by {names}, which a profiler recorded and slowed. Other processes ran without one."


def trajectories(number: float) -> str:
    """Return a number of trajectories as text: `1 trajectory`, `2.5 trajectories`."""
    return f"{number:g} {'trajectory' if number == 1 else 'trajectories'}"


def draw_long_tail(tail: LongTail | None, page: Page) -> Iterator[Html]:
    """Yield the trajectories in lanes, and the long tail. Nothing if the step has no trajectory."""
    if tail is None:
        return
    packed = pack_trajectories(page.timeline, [slow.trajectory for slow in tail.worst])
    if packed is not None:
        yield lanes(packed, page.timeline.window.wall_ns, page.colours)
    yield _drawn_spreads(tail, page.colours)


def _drawn_spreads(tail: LongTail, colours: Colours) -> Html:
    """Return the section with the percentiles of each stage and the slowest trajectories by stage."""
    block = _spread_table(tail)
    text = tag("p", block.note, class_="said") if block.note else EMPTY
    bars = [_spread_bar(spread, colours) for spread in tail.spreads]
    spreads = illustrated(block, 3, "p50, p90, p99, max", bars, "spreads")
    turns = (draw(table) for table in _turn_tables(tail.worst))
    return section("tail", "Long tail", text, spreads, *_slowest(tail.worst, colours), *turns)


def _spread_bar(spread: Spread, colours: Colours) -> Html:
    longest_ns, colour = spread.max.ns, colours.of((spread.role, spread.stage))
    points = (("p50", spread.p50_ns), ("p90", spread.p90_ns), ("p99", spread.p99.ns), ("max", longest_ns))
    marks = (
        tag("i", class_=f"point {name}", style=f"left:{percent(ns, longest_ns)}", data_t=hover)
        for name, ns in points
        for hover in [f"{name} {duration(ns)}"]
    )
    body = tag("i", class_=f"m {colour}", style=f"left:0;width:{percent(spread.p50_ns, longest_ns)}")
    return tag("div", body, *marks, class_="spread")


def _slowest(worst: Sequence[SlowTrajectory], colours: Colours) -> Iterator[Html]:
    if worst:
        longest_ns = max(slow.wall_ns for slow in worst)
        bars = [stacked(_parts(slow, colours), longest_ns) for slow in worst]
        yield tag("h3", "Slowest trajectories")
        yield illustrated(_slowest_table(worst), 3, "what it did or waited for", bars, "slowest")


def _parts(slow: SlowTrajectory, colours: Colours) -> Iterator[tuple[str, int, str]]:
    for wait in slow.waits:
        hover = f"{wait.role} {wait.title} {duration(wait.wall_ns)}"
        yield colours.of((wait.role, wait.stage)), wait.wall_ns, hover


LONG_TAIL = Section(
    name="long_tail",
    title="Long tail",
    compute=lambda sources: step_long_tail(sources.timeline),
    terminal=long_tail_blocks,
    html=draw_long_tail,
    page=ROLLOUT,
)
