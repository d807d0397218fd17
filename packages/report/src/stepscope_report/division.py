"""Division of time among spans. Each instant is attributed to the leaves of the lowest tier. A leaf is a
running span with no running span below it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from itertools import pairwise
from typing import NamedTuple, TypeVar

from stepscope.files.spans import PROFILING
from stepscope_report.accounting import Held, Interval, Label, Mask, Shares, divide
from stepscope_report.spans import ReplicaKey, ToolNames, is_tool, label_of, replica_of
from stepscope_report.timeline import Span, Timeline

STALLED: Label = ("profiler", "engine trace")
"""Label of the time in which engines serve nothing because of their own profilers."""
NOT_KNOWN: Label = ("", "not known")
"""Label of time in which it is unknown what the step waited for."""
WINDOWS: Label = ("profiler", "windows of stages")
"""Label of the time in which profilers were started and stopped around stages (discrete mode)."""
_Kind = TypeVar("_Kind", bound=Hashable)
_ANY = ReplicaKey(-1)
_WORKER, _OWNER, _LATER_WORKER, _LATER_OWNER, WAITING = range(5)
"""Tiers of leaves: an instant is attributed to the leaves of the lowest tier."""


class Work(NamedTuple):
    """Spans as intervals, and the label, tier and engine of each kind of interval. The index in the lists is
    `Interval.bit`.
    """

    intervals: list[Interval]
    labels: list[Label]
    tiers: list[int]
    engines: list[ReplicaKey | None]
    """For each kind, the replica that does the work; `_ANY` if an unknown engine does it, None if no engine
    does."""


def work_of(timeline: Timeline, indices: Sequence[int], names: ToolNames | None = None) -> Work:
    """Return the spans at `indices` as `Work`. With `names`, each tool has its own label."""
    driver = driver_of(timeline)

    def kind_of(span: Span) -> tuple[Label, int, ReplicaKey | None]:
        own = label_of(span) if names is None else names.label_of(span)
        label = WINDOWS if span.stage == PROFILING else own
        return label, _tier(timeline, span, driver), _engine(timeline, span)

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
    """Return (the spans at `indices` as intervals, the kind of each bit).

    Spans of unaligned processes get no length, because their place on the timeline is unknown.
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
    """Return the index of the parent that a span is a part of, or None.

    Work for a later step is not a part of the span that began it, because that span belongs to this step.
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

    Spans for this step have precedence over spans for a later step, then spans of workers over spans of the
    owner. Waits come last.
    """
    return divide_work(timeline, work_of(timeline, indices, names), start_ns, end_ns)


def divide_work(timeline: Timeline, work: Work, start_ns: int, end_ns: int) -> Shares:
    """Divide a stretch of time among the intervals of `work`."""
    return _divided(start_ns, end_ns, work, _held(timeline, work.engines))


def _divided(start_ns: int, end_ns: int, work: Work, held: Sequence[Held]) -> Shares:
    return divide(work.intervals, start_ns, end_ns, labels=work.labels, tiers=work.tiers, held=held)


def stalled_most_ns(timeline: Timeline, work: Work) -> int:
    """Return the upper bound, in ns, of the time in which stalls of engines held up the step. Work of an
    unknown engine counts as held up while any engine stalls.
    """
    held = _held(timeline, work.engines, by_any=True)
    return _divided(timeline.window.start_ns, timeline.window.end_ns, work, held).wall_ns[STALLED]


def _held(timeline: Timeline, engines: Sequence[ReplicaKey | None], *, by_any: bool = False) -> list[Held]:
    """Return the stalls of replicas, with the kinds of work that each of them held up.

    Work of an unknown engine is held up while all engines stall, or with `by_any` while any engine stalls.
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
    """Return the kinds of work that stalls hold up. With `whole`, this includes work of unknown engines."""
    if not stalled:
        return 0
    return sum(
        1 << bit for bit, engine in enumerate(engines) if engine in stalled or (whole and engine == _ANY)
    )


def _engine(timeline: Timeline, span: Span) -> ReplicaKey | None:
    """Return the engine that a span waits for: `_ANY` if the span names no engine. None if no engine stalled,
    or if the span waits for no engine.

    A turn without a span below it waits for the model, because tools have spans of their own.
    """
    if not timeline.stalls or is_tool(span.role, span.stage):
        return None
    if span.role != "rollout" and (span.role, span.stage) != ("agent_loop", "turn"):
        return None
    replica = replica_of(timeline, span)
    return _ANY if replica is None else replica


def driver_of(timeline: Timeline) -> int | None:
    """Return the index of the only owner, whose calls count only while no other process works. None if
    several processes opened their own captures, because such ranks work as any worker does.
    """
    owners = [index for index, process in enumerate(timeline.processes) if process.owner]
    return owners[0] if len(owners) == 1 else None


def _tier(timeline: Timeline, span: Span, driver: int | None) -> int:
    if span.waits:
        return WAITING
    owner = span.process == driver
    if timeline.leaves(span):  # nothing in this step waits for the span
        return _LATER_OWNER if owner else _LATER_WORKER
    return _OWNER if owner else _WORKER


def beside_step(timeline: Timeline) -> tuple[int, int]:
    """Return the time in ns for opening and for closing the capture.

    If each rank opens its own capture, these are the longest times of any rank, because the other ranks wait.
    """
    if not timeline.window.opened:
        return 0, 0
    costs = [process.cost for process in timeline.processes if process.owner and process.cost is not None]
    return max((cost.start_ns for cost in costs), default=0), max((cost.stop_ns for cost in costs), default=0)
