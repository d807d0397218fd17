"""The step as a Gantt chart: stages of each role and process over time, in as many marks as a page shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

import msgspec

from stepscope_report.accounting import Label
from stepscope_report.charts.marks import Mark, blend_short, blocks, fit, join_near, pick, runs
from stepscope_report.sections.stages import Stage
from stepscope_report.table import grouped
from stepscope_report.timeline import Span, Timeline

MARKS = 12_000
"""Largest number of marks. A page with three times as many takes seconds to open."""
FULL_ROWS = 32
"""Processes of a role that have a row with a lane for each stage; of more, each is one thin strip."""
STRIPS = 512
"""Strips of a role; of more processes every k-th is drawn, and those that are slowest in some stage."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    host: str
    aligned: bool
    """False: nobody knows where its spans belong, so that none is drawn."""
    lanes: tuple[tuple[Mark, ...], ...]
    """Callers above what they call. A strip has one lane."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    strips: bool
    """True if a process is drawn as a strip of its most specific stage at each instant."""
    processes: int
    rows: tuple[Row, ...]
    """Fewer than `processes` where not all are drawn."""


class Gantt(msgspec.Struct, frozen=True, kw_only=True):
    window_ns: int
    groups: tuple[Group, ...]
    """The owner's first, then in the timeline's order."""
    marks: int
    spans: int
    """All spans of the step."""
    shortest_ns: int
    """Neighbours shorter than this, or nearer to each other, are drawn as one."""


def draw_gantt(timeline: Timeline, stages: Sequence[Stage], budget: int = MARKS) -> Gantt:
    """Return the chart of one step, whose table is `stages`.

    Positions of marks are exact, except for united ones.
    """
    slowest = {stage.slowest for stage in stages if stage.slowest is not None}
    drawn, shortest_ns = fit(_groups(timeline, slowest), timeline.window.wall_ns, budget, _thin, _count)
    return Gantt(
        window_ns=timeline.window.wall_ns,
        groups=drawn,
        marks=_count(drawn),
        spans=len(timeline.spans),
        shortest_ns=shortest_ns,
    )


def _count(groups: Iterable[Group]) -> int:
    return sum(len(lane) for group in groups for row in group.rows for lane in row.lanes)


def _thin(groups: Iterable[Group], shortest_ns: int) -> tuple[Group, ...]:
    return tuple(
        msgspec.structs.replace(
            group, rows=tuple(_thin_row(row, group.strips, shortest_ns) for row in group.rows)
        )
        for group in groups
    )


def _thin_row(row: Row, strip: bool, shortest_ns: int) -> Row:
    fewer = blend_short if strip else _join_by_stage
    return msgspec.structs.replace(row, lanes=tuple(tuple(fewer(lane, shortest_ns)) for lane in row.lanes))


def _join_by_stage(lane: Iterable[Mark], gap_ns: int) -> list[Mark]:
    """Join the marks of each stage by itself: stages that share a lane never overlap."""
    stages = grouped(lane, lambda mark: mark.label).values()
    joined = chain.from_iterable(join_near(marks, gap_ns) for marks in stages)
    return sorted(joined, key=lambda mark: mark.start_ns)


def _groups(timeline: Timeline, slowest: set[str]) -> tuple[Group, ...]:
    roles = grouped(range(len(timeline.processes)), lambda at: timeline.processes[at].info.role)
    spans = grouped(range(len(timeline.spans)), lambda at: timeline.spans[at].process)
    return tuple(_group(timeline, role, members, spans, slowest) for role, members in roles.items())


def _group(
    timeline: Timeline, role: str, members: list[int], spans: Mapping[int, list[int]], slowest: set[str]
) -> Group:
    strips = len(members) > FULL_ROWS
    wanted = [place for place, index in enumerate(members) if timeline.processes[index].name in slowest]
    drawn = pick(len(members), STRIPS, wanted)
    rows = tuple(_row(timeline, members[place], spans.get(members[place], []), strips) for place in drawn)
    return Group(role=role, strips=strips, processes=len(members), rows=rows)


def _row(timeline: Timeline, index: int, spans: list[int], strip: bool) -> Row:
    process, window = timeline.processes[index], timeline.window
    lanes: tuple[tuple[Mark, ...], ...] = ()
    if process.aligned and strip:
        lanes = (tuple(runs(timeline, spans, window.start_ns, window.end_ns)),)
    elif process.aligned:
        lanes = _lanes(timeline, spans)
    return Row(name=process.name, host=process.info.host, aligned=process.aligned, lanes=lanes)


def _lanes(timeline: Timeline, indices: Sequence[int]) -> tuple[tuple[Mark, ...], ...]:
    """Return a lane for each stage, below its callers'. Stages that never overlap share one."""
    calls, callers = _calls(timeline, indices)
    lanes: list[list[Mark]] = []
    place: dict[Label, int] = {}
    for label in _callers_first(calls, callers):
        marks = blocks(timeline, calls[label])
        below = max((place[caller] + 1 for caller in callers[label] if caller in place), default=0)
        free = (at for at in range(below, len(lanes)) if not _collide(lanes[at], marks))
        place[label] = next(free, max(below, len(lanes)))
        lanes += [[] for _ in range(place[label] + 1 - len(lanes))]
        lanes[place[label]] = sorted([*lanes[place[label]], *marks], key=lambda mark: mark.start_ns)
    return tuple(tuple(lane) for lane in lanes)


def _calls(
    timeline: Timeline, indices: Sequence[int]
) -> tuple[dict[Label, list[Span]], dict[Label, set[Label]]]:
    """Return the spans by stage, and the stages of this process that called each one directly."""
    calls: dict[Label, list[Span]] = defaultdict(list)
    callers: dict[Label, set[Label]] = defaultdict(set)
    for index in indices:
        span = timeline.spans[index]
        label = (span.role, span.stage)
        calls[label].append(span)
        parent = None if span.parent is None else timeline.spans[span.parent]
        if parent is not None and parent.process == span.process:
            callers[label].add((parent.role, parent.stage))
    return calls, callers


def _callers_first(calls: Iterable[Label], callers: Mapping[Label, set[Label]]) -> list[Label]:
    """Return the stages by first call, each after its callers.

    Of stages that call each other the first leads.
    """
    order: dict[Label, None] = {}

    def add(label: Label, above: tuple[Label, ...]) -> None:
        for caller in sorted(callers.get(label, ())):
            if caller not in order and caller not in above and caller != label:
                add(caller, (*above, label))
        order.setdefault(label)

    for label in calls:
        add(label, ())
    return list(order)


def _collide(one: Sequence[Mark], other: Sequence[Mark]) -> bool:
    """Return whether any marks of two lanes overlap. Each lane is in order and has no overlaps."""
    both = sorted(chain(one, other), key=lambda mark: (mark.start_ns, mark.end_ns))
    return any(mark.start_ns < before.end_ns for before, mark in pairwise(both))
