"""Where a step went, with opening and closing its capture: lines that add up to 100 % of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.report.accounting import Interval, Label, Shares, divide
from stepscope.timeline import Span, Timeline

LineKind: TypeAlias = Literal["stage", "profiler", "unaccounted"]
WAITING = frozenset({"queue", "wait"})
"""Stages that are waiting and not work: they are billed only while nothing works."""
_WORKER, _OWNER, _LATER_WORKER, _LATER_OWNER, _WAITING = range(5)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the account."""

    kind: LineKind
    """`profiler`: what opening and closing the capture cost its owner. `unaccounted`: no span ran."""
    role: str | None = None
    stage: str | None = None
    wall_ns: int
    """Its share of the total."""
    alone_ns: int
    """Of that, what it did not share."""
    active_ns: int
    """How long it went on at all; what exceeds `wall_ns` was shared or hidden behind others."""


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Stages that an instant was split among, and for how long that was so."""

    stages: tuple[Label, ...]
    wall_ns: int


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one step."""

    total_ns: int
    """The capture's window and what opening and closing it cost the owner: what the lines add up to."""
    window_ns: int
    lines: tuple[Line, ...]
    """Stages by share, then the profiler, then what is unaccounted."""
    overlaps: tuple[Overlap, ...]
    """The longest first."""
    left_out: tuple[str, ...]
    """Unaligned processes: where their spans belong is not known, so that they are in no line."""


def break_down(timeline: Timeline) -> Breakdown:
    """The account of the owner's wall clock from the capture's opening to its closing, by role and stage."""
    window = timeline.window
    shares = divide_spans(timeline, range(len(timeline.spans)), window.start_ns, window.end_ns)
    cost = timeline.processes[0].cost if window.opened else None
    profiler_ns = 0 if cost is None else cost.start_ns + cost.stop_ns - cost.inside_ns
    labels = sorted(
        shares.active_ns, key=lambda label: (-shares.wall_ns[label], -shares.active_ns[label], label)
    )
    stages = [_stage(label, shares) for label in labels]
    return Breakdown(
        total_ns=window.wall_ns + profiler_ns,
        window_ns=window.wall_ns,
        lines=(*stages, _other("profiler", profiler_ns), _other("unaccounted", shares.idle_ns)),
        overlaps=tuple(Overlap(stages=stages, wall_ns=ns) for stages, ns in shares.together_ns.most_common()),
        left_out=tuple(process.name for process in timeline.processes if not process.aligned),
    )


def _stage(label: Label, shares: Shares) -> Line:
    return Line(
        kind="stage",
        role=label[0],
        stage=label[1],
        wall_ns=shares.wall_ns[label],
        alone_ns=shares.alone_ns[label],
        active_ns=shares.active_ns[label],
    )


def _other(kind: LineKind, ns: int) -> Line:
    return Line(kind=kind, wall_ns=ns, alone_ns=ns, active_ns=ns)


class Work(NamedTuple):
    """Spans as intervals, and by bit what they are."""

    intervals: list[Interval]
    labels: list[Label]
    tiers: list[int]


def work_of(timeline: Timeline, indices: Sequence[int]) -> Work:
    """Some of the spans as intervals. Those of unaligned processes have no length: nobody knows where."""
    kinds: dict[tuple[Label, int], int] = {}
    places = {index: place for place, index in enumerate(indices)}
    intervals = []
    for index in indices:
        span = timeline.spans[index]
        bit = kinds.setdefault(((span.role, span.stage), _tier(timeline, span)), len(kinds))
        parent = part_of(timeline, span)
        above = None if parent is None else places.get(parent)
        ends_ns = timeline.until_ns(span) if timeline.processes[span.process].aligned else span.start_ns
        intervals.append(Interval(span.start_ns, ends_ns, above, bit))
    return Work(intervals, [label for label, _ in kinds], [tier for _, tier in kinds])


def part_of(timeline: Timeline, span: Span) -> int | None:
    """The span that it is a part of. A later step's work is no part of this step's: who began it goes on."""
    if span.parent is None or span.step > timeline.step >= timeline.spans[span.parent].step:
        return None
    return span.parent


def divide_spans(timeline: Timeline, indices: Sequence[int], start_ns: int, end_ns: int) -> Shares:
    """Divides a stretch of time among some of the spans: this step's before a later one's, a worker's before
    the owner's, and waiting last.
    """
    intervals, labels, tiers = work_of(timeline, indices)
    return divide(intervals, start_ns, end_ns, labels=labels, tiers=tiers)


def _tier(timeline: Timeline, span: Span) -> int:
    if span.stage in WAITING:
        return _WAITING
    owner = timeline.processes[span.process].owner
    if span.step > timeline.step:  # nobody in this step waits for it
        return _LATER_OWNER if owner else _LATER_WORKER
    return _OWNER if owner else _WORKER
