"""The step over time: stages of each role and process, and trajectories packed into lanes.

Both charts have at most as many marks as a page can show.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Up to this many processes of a role get a row with a lane for each stage; in a larger role each is a thin
strip."""
STRIPS = 512
"""Largest number of strips of a role. Of more processes every k-th is drawn, plus the slowest ones of each
stage."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    host: str
    aligned: bool
    """False if the process has no clock offset to the owner, so that none of its spans is drawn."""
    lanes: tuple[tuple[Mark, ...], ...]
    """The marks of each lane, callers above the stages that they call. A strip has one lane."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    strips: bool
    """True if a process is drawn as a strip of its most specific stage at each instant."""
    processes: int
    rows: tuple[Row, ...]
    """The drawn rows; fewer than `processes` if some are left out."""


class Gantt(msgspec.Struct, frozen=True, kw_only=True):
    window_ns: int
    groups: tuple[Group, ...]
    """The owner's group first, then the others in the timeline's order."""
    marks: int
    spans: int
    """Number of all spans of the step."""
    shortest_ns: int
    """Neighbouring marks shorter than this, or nearer to each other than this, are drawn as one mark."""


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
    """Return a lane for each stage, below the lanes of its callers. Stages that never overlap share a
    lane.
    """
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

    If stages call each other, the one called first leads.
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


LANE_MARKS = 8_000
LANES = 256
"""Largest number of lanes drawn. Of more lanes every k-th is drawn, plus those of the slowest
trajectories."""
SAMPLES = 240
"""Points of the curve of trajectories in flight."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory in its lane. Times are ns after the capture opened."""

    trajectory: str
    start_ns: int
    end_ns: int
    open: bool
    """True if no end of the trajectory was recorded."""
    marks: tuple[Mark, ...]
    """Work and waits of the trajectory, one stage at a time: the most specific one."""


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int
    needed: int
    """Number of lanes that all trajectories take, which is the largest number that ran at once."""
    lanes: tuple[tuple[Flight, ...], ...]
    """The drawn lanes; fewer than `needed` if some are left out."""
    in_flight: tuple[float, ...]
    """Number of requests that ran, on average, in each of `SAMPLES` equal parts of the window."""
    marks: int
    shortest_ns: int
    """Neighbours shorter than this are drawn as one."""


def pack_trajectories(
    timeline: Timeline, slowest: Iterable[str] = (), budget: int = LANE_MARKS
) -> Lanes | None:
    """Return the lanes of one step, always with those of the `slowest`. None if the step has no
    trajectories.
    """
    members = grouped(_members(timeline), lambda index: timeline.spans[index].trajectory or "")
    if not members:
        return None
    flights = [_flight(timeline, name, own) for name, own in members.items()]
    flights.sort(key=lambda flight: flight.start_ns)
    extents = [(flight.start_ns, flight.end_ns) for flight in flights]
    slots = pack(extents)
    needed = max(slots) + 1
    names = set(slowest)
    wanted = [slot for slot, flight in zip(slots, flights, strict=True) if flight.trajectory in names]
    drawn = {slot: place for place, slot in enumerate(pick(needed, LANES, wanted))}
    lanes: list[list[Flight]] = [[] for _ in drawn]
    for slot, flight in zip(slots, flights, strict=True):
        if slot in drawn:
            lanes[drawn[slot]].append(_marked(timeline, flight, members[flight.trajectory]))
    thin, shortest_ns = fit([*map(tuple, lanes)], timeline.window.wall_ns, budget, _thin_lanes, _flights)
    return Lanes(
        trajectories=len(flights),
        needed=needed,
        lanes=tuple(thin),
        in_flight=tuple(_in_flight(timeline.window.wall_ns, extents)),
        marks=_flights(thin),
        shortest_ns=shortest_ns,
    )


def pack(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lane of each (start, end), sorted by start: the lowest one that is free then.

    No lane is wasted.
    """
    slots: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(end, start + 1), slot))
        slots.append(slot)
    return slots


def _members(timeline: Timeline) -> Iterator[int]:
    for index, span in enumerate(timeline.spans):
        if span.trajectory is not None and timeline.processes[span.process].aligned:
            yield index


def _flight(timeline: Timeline, name: str, indices: list[int]) -> Flight:
    """Return a trajectory without marks.

    It lasts from the opening of the span `trajectory` to its end, or for the extent of all spans with its id.
    """
    own = [timeline.spans[index] for index in indices]
    spans = [span for span in own if span.stage == "trajectory"] or own
    zero_ns = timeline.window.start_ns
    return Flight(
        trajectory=name,
        start_ns=min(span.start_ns for span in spans) - zero_ns,
        end_ns=max(timeline.until_ns(span) for span in spans) - zero_ns,
        open=any(span.end_ns is None for span in spans),
        marks=(),
    )


def _marked(timeline: Timeline, flight: Flight, indices: Sequence[int]) -> Flight:
    zero_ns = timeline.window.start_ns
    marks = runs(timeline, indices, flight.start_ns + zero_ns, flight.end_ns + zero_ns)
    return msgspec.structs.replace(flight, marks=tuple(marks))


def _thin_lanes(lanes: Sequence[Sequence[Flight]], shortest_ns: int) -> list[tuple[Flight, ...]]:
    return [
        tuple(
            msgspec.structs.replace(flight, marks=tuple(blend_short(flight.marks, shortest_ns)))
            for flight in lane
        )
        for lane in lanes
    ]


def _flights(lanes: Iterable[Iterable[Flight]]) -> int:
    return sum(len(flight.marks) for lane in lanes for flight in lane)


def _in_flight(window_ns: int, flights: Sequence[tuple[int, int]]) -> list[float]:
    part_ns = max(1, -(-window_ns // SAMPLES))
    change = [0.0] * (SAMPLES + 2)
    for start_ns, end_ns in flights:
        _add(change, start_ns / part_ns, 1)
        _add(change, end_ns / part_ns, -1)
    running, curve = 0.0, []
    for place in range(SAMPLES):
        running += change[place]
        curve.append(max(0.0, round(running, 3)))
    return curve


def _add(change: list[float], at: float, by: int) -> None:
    """Change the curve by `by` from the position `at` on; the part that holds `at` gets only its share."""
    at = min(max(at, 0.0), float(SAMPLES))
    place = int(at)
    change[place] += by * (1 - (at - place))
    change[place + 1] += by * (at - place)
