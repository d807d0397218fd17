"""The account of a step: lines that add up to 100 % of it, with opening and closing its capture beside it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from stepscope.files.spans import PROFILING
from stepscope_report.accounting import Held, Interval, Label, Mask, Shares, divide
from stepscope_report.spans import TRANSFER, ReplicaKey, ToolNames, is_tool, is_transfer, label_of, replica_of
from stepscope_report.tables.gaps import Gap, Stretch, find_stretches, sum_up
from stepscope_report.timeline import Span, Timeline

LineKind: TypeAlias = Literal["stage", "profiler", "unaccounted"]
STALLED: Label = ("profiler", "engine trace")
"""Label of engines that serve nothing because of their own profiler."""
WINDOWS: Label = ("profiler", "windows of stages")
"""Profilers that were started and stopped around stages (discrete mode)."""
_Kind = TypeVar("_Kind", bound=Hashable)
_ANY = ReplicaKey(-1)
_WORKER, _OWNER, _LATER_WORKER, _LATER_OWNER, WAITING = range(5)
"""Tiers of leaves: an instant is billed to the lowest."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the account."""

    kind: LineKind
    """`profiler`: profilers inside the step: engines that served nothing for their own one, and the windows
    of stages. `unaccounted`: no span ran."""
    role: str | None = None
    stage: str | None = None
    wall_ns: int
    """Its share of the step."""
    alone_ns: int
    """Of that, what it did not share."""
    active_ns: int
    """The time in which it went on at all; what exceeds `wall_ns` was shared or hidden behind others."""
    waits: bool = False
    """It is waiting and no work: billed only while nothing works."""


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Stages that an instant was split among, and for how long that was so."""

    stages: tuple[Label, ...]
    wall_ns: int


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one step."""

    window_ns: int
    """The step alone, from the end of the capture's opening to the begin of its closing: 100 %, and what the
    lines add up to."""
    opening_ns: int
    """The owner's time for opening the capture, before the step; of several owners, the slowest one's."""
    closing_ns: int
    """The same for closing it, after the step."""
    total_ns: int
    """Opening, step and closing: what passed on the clock of the code around the capture."""
    lines: tuple[Line, ...]
    """Stages by share, then the profiler, if it took some of the step, then what is unaccounted."""
    overlaps: tuple[Overlap, ...]
    """The longest first."""
    gaps: tuple[Gap, ...]
    """The parts of the unaccounted time, the longest first. They add up to it."""
    stalled_ns: int = 0
    """Of the step, while what would have been an engine's work waited for the engine's own profiler."""
    stalled_most_ns: int = 0
    """The same if all work whose spans name no replica waited for the one that wrote."""
    left_out: tuple[str, ...]
    """Unaligned processes: where their spans belong is not known, so that they are in no line."""


def step_breakdown(timeline: Timeline) -> Breakdown:
    """Return the account of the owner's wall clock during the capture, by role and stage."""
    window = timeline.window
    work = work_of(timeline, range(len(timeline.spans)))
    shares = _divide(timeline, work, window.start_ns, window.end_ns)
    gaps = _name_transfers(find_stretches(work.intervals, window.start_ns, window.end_ns), work, shares)
    stalled_ns = shares.wall_ns.pop(STALLED, 0)
    profiler_ns = stalled_ns + shares.wall_ns.pop(WINDOWS, 0)
    for label in (STALLED, WINDOWS):
        shares.active_ns.pop(label, None)
    opening_ns, closing_ns = beside_step(timeline)
    labels = sorted(
        shares.active_ns, key=lambda label: (-shares.wall_ns[label], -shares.active_ns[label], label)
    )
    works = {label_of(span) for span in timeline.spans if not span.waits}
    waits = {label_of(span) for span in timeline.spans if span.waits} - works
    stages = [_stage(label, shares, waits=label in waits) for label in labels]
    return Breakdown(
        total_ns=opening_ns + window.wall_ns + closing_ns,
        stalled_ns=stalled_ns,
        stalled_most_ns=_stalled_most_ns(timeline, work) if timeline.stalls else 0,
        window_ns=window.wall_ns,
        opening_ns=opening_ns,
        closing_ns=closing_ns,
        lines=(
            *stages,
            *([_other("profiler", profiler_ns)] if profiler_ns else ()),
            _other("unaccounted", shares.idle_ns),
        ),
        overlaps=tuple(Overlap(stages=stages, wall_ns=ns) for stages, ns in shares.together_ns.most_common()),
        gaps=gaps,
        left_out=tuple(process.name for process in timeline.processes if not process.aligned),
    )


def beside_step(timeline: Timeline) -> tuple[int, int]:
    """Return the time for opening and for closing the capture.

    Ranks that each open a capture of their own wait for the slowest of them in the step: its times count.
    """
    if not timeline.window.opened:
        return 0, 0
    costs = [process.cost for process in timeline.processes if process.owner and process.cost is not None]
    return max((cost.start_ns for cost in costs), default=0), max((cost.stop_ns for cost in costs), default=0)


def _name_transfers(stretches: Iterable[Stretch], work: Work, shares: Shares) -> tuple[Gap, ...]:
    """Bill to the weight sync what passes between its ends. Return what is left without a name."""

    def label_of(index: int | None) -> Label | None:
        return None if index is None else work.labels[work.intervals[index].bit]

    unnamed = []
    for stretch in stretches:
        before, after = label_of(stretch.before), label_of(stretch.after)
        if after is not None and is_transfer(before, after):
            shares.idle_ns -= stretch.wall_ns
            for counter in (shares.wall_ns, shares.alone_ns, shares.active_ns):
                counter[after[0], TRANSFER] += stretch.wall_ns
        else:
            unnamed.append((before, after, stretch.wall_ns))
    return sum_up(unnamed)


def _stage(label: Label, shares: Shares, *, waits: bool) -> Line:
    return Line(
        kind="stage",
        role=label[0],
        stage=label[1],
        wall_ns=shares.wall_ns[label],
        alone_ns=shares.alone_ns[label],
        active_ns=shares.active_ns[label],
        waits=waits,
    )


def _other(kind: LineKind, ns: int) -> Line:
    return Line(kind=kind, wall_ns=ns, alone_ns=ns, active_ns=ns)


class Work(NamedTuple):
    """Spans as intervals, and by bit what they are."""

    intervals: list[Interval]
    labels: list[Label]
    tiers: list[int]
    engines: list[ReplicaKey | None]
    """The replica that does it; `_ANY`: an engine, and nothing says which. None: no engine."""


def work_of(timeline: Timeline, indices: Sequence[int], names: ToolNames | None = None) -> Work:
    """Return some of the spans as intervals. With `names`, tools are told apart."""

    def kind_of(span: Span) -> tuple[Label, int, ReplicaKey | None]:
        own = label_of(span) if names is None else names.label_of(span)
        label = WINDOWS if span.stage == PROFILING else own
        return label, _tier(timeline, span), _engine(timeline, span)

    intervals, kinds = intervals_of(timeline, indices, kind_of)
    return Work(
        intervals,
        [label for label, _, _ in kinds],
        [tier for _, tier, _ in kinds],
        [engine for _, _, engine in kinds],
    )


def intervals_of(
    timeline: Timeline, indices: Sequence[int], kind_of: Callable[[Span], _Kind]
) -> tuple[list[Interval], list[_Kind]]:
    """Return some of the spans as intervals, and by bit their kinds.

    Those of unaligned processes have no length, because their place is unknown.
    """
    kinds: dict[_Kind, int] = {}
    places = {index: place for place, index in enumerate(indices)}
    intervals = []
    for index in indices:
        span = timeline.spans[index]
        bit = kinds.setdefault(kind_of(span), len(kinds))
        parent = _part_of(timeline, span)
        above = None if parent is None else places.get(parent)
        ends_ns = timeline.until_ns(span) if timeline.processes[span.process].aligned else span.start_ns
        intervals.append(Interval(span.start_ns, ends_ns, above, bit))
    return intervals, list(kinds)


def _part_of(timeline: Timeline, span: Span) -> int | None:
    """Return the span that a span is a part of.

    A later step's work is no part of this step's: who began it goes on.
    """
    if span.parent is None:
        return None
    if timeline.leaves(span) and not timeline.leaves(timeline.spans[span.parent]):
        return None
    return span.parent


def divide_spans(
    timeline: Timeline, indices: Sequence[int], start_ns: int, end_ns: int, names: ToolNames | None = None
) -> Shares:
    """Divide a stretch of time among some of the spans.

    Spans of this step come before those of a later one, a worker's before the owner's, and waiting last.
    """
    return _divide(timeline, work_of(timeline, indices, names), start_ns, end_ns)


def _divide(timeline: Timeline, work: Work, start_ns: int, end_ns: int) -> Shares:
    return _of_held(start_ns, end_ns, work, _held(timeline, work.engines))


def _of_held(start_ns: int, end_ns: int, work: Work, held: Sequence[Held]) -> Shares:
    return divide(work.intervals, start_ns, end_ns, labels=work.labels, tiers=work.tiers, held=held)


def _stalled_most_ns(timeline: Timeline, work: Work) -> int:
    """Return the time that is billed to stalls if work of an unnamed engine is held up by any of them."""
    held = _held(timeline, work.engines, by_any=True)
    return _of_held(timeline.window.start_ns, timeline.window.end_ns, work, held).wall_ns[STALLED]


def _held(timeline: Timeline, engines: Sequence[ReplicaKey | None], *, by_any: bool = False) -> list[Held]:
    """Return the stalls of replicas, with the kinds of work that each of them held up.

    Work of an unnamed engine is held up when all of them stall, or `by_any`.
    """
    changes = sorted(
        change
        for stall in timeline.stalls
        for key in (ReplicaKey(stall.replica),)
        for change in ((stall.start_ns, 1, key), (stall.end_ns, -1, key))
    )
    stalled = set[ReplicaKey]()
    held = []
    for (at_ns, change, replica), (until_ns, _, _) in pairwise(changes):
        (stalled.add if change > 0 else stalled.discard)(replica)
        mask = _mask(engines, stalled, whole=by_any or len(stalled) >= timeline.replicas)
        if mask and at_ns < until_ns:
            held.append(Held(at_ns, until_ns, mask, STALLED))
    return held


def _mask(engines: Sequence[ReplicaKey | None], stalled: Set[ReplicaKey], *, whole: bool) -> Mask:
    """Return the kinds of work that stalls hold up. `whole`: work of an unnamed engine too."""
    if not stalled:
        return 0
    return sum(
        1 << bit for bit, engine in enumerate(engines) if engine in stalled or (whole and engine == _ANY)
    )


def _engine(timeline: Timeline, span: Span) -> ReplicaKey | None:
    """Return the engine that a span waits for, if any engine stalled.

    A turn without a span below it waits for the model: tools have spans of their own.
    """
    if not timeline.stalls or is_tool(span.role, span.stage):
        return None
    if span.role != "rollout" and (span.role, span.stage) != ("agent_loop", "turn"):
        return None
    replica = replica_of(timeline, span)
    return _ANY if replica is None else replica


def _tier(timeline: Timeline, span: Span) -> int:
    if span.waits:
        return WAITING
    owner = timeline.processes[span.process].owner
    if timeline.leaves(span):  # nobody in this step waits for it
        return _LATER_OWNER if owner else _LATER_WORKER
    return _OWNER if owner else _WORKER
