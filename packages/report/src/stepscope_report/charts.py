"""The step over time: stages of each role and process, and trajectories packed into lanes.

A page can show only so many marks, so neighbouring blocks that a screen could not show apart become one mark.
Both charts are in one file because they share these marks.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stepscope_report.accounting import Label, Mask, bits_of, walk
from stepscope_report.division import work_of
from stepscope_report.table import grouped
from stepscope_report.timeline import Span, Timeline

if TYPE_CHECKING:
    from stepscope_report.sections.stages import Stage

_Row = TypeVar("_Row")
_Drawn = TypeVar("_Drawn")


class Mark(msgspec.Struct, frozen=True, gc=False):
    """One block. Times are ns after the capture opened."""

    label: Label
    """The stage of the mark; if the mark covers several stages, the stage with the most time."""
    start_ns: int
    end_ns: int
    spans: int = 1
    """Number of calls that the mark stands for. A mark of `_runs` counts stretches of time instead."""
    at_once: int = 1
    """Largest number of the mark's calls that ran at once."""
    open: bool = False
    """True if a call of the mark never ended. The mark then extends to the process' last sign of life."""
    failed: int = 0
    """Number of the mark's calls that ended with an exception."""
    gaps_ns: int = 0
    """Time inside the mark in which none of its calls ran."""


def _blocks(timeline: Timeline, spans: Iterable[Span]) -> list[Mark]:
    """Return the calls of one stage in one process as blocks: calls that overlap or touch share a block."""
    zero_ns = timeline.window.start_ns
    marks: list[Mark] = []
    running: list[int] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        mark = Mark(
            (span.role, span.stage),
            span.start_ns - zero_ns,
            timeline.until_ns(span) - zero_ns,
            open=span.end_ns is None,
            failed=int(span.error is not None),
        )
        while running and running[0] <= mark.start_ns:
            heapq.heappop(running)
        heapq.heappush(running, mark.end_ns)
        if marks and mark.start_ns <= marks[-1].end_ns:
            marks[-1] = _unite((marks[-1], mark), at_once=len(running))
        else:
            marks.append(mark)
    return marks


def join_near(marks: Iterable[Mark], gap_ns: int) -> list[Mark]:
    """Unite neighbouring marks of one stage that are less than `gap_ns` apart, if at least one mark
    of the two is shorter than `gap_ns`.
    """
    joined: list[Mark] = []
    for mark in marks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and mark.start_ns - last.end_ns < gap_ns
            and min(_wall_ns(mark), _wall_ns(last)) < gap_ns
        ):
            joined[-1] = _unite((last, mark))
        else:
            joined.append(mark)
    return joined


def _runs(timeline: Timeline, indices: Sequence[int], start_ns: int, end_ns: int) -> list[Mark]:
    """Return the stage that ran at each instant from `start_ns` to `end_ns` (unix ns), as marks.

    If several innermost calls run, work comes before waiting, and then the first stage by name. A time in
    which nothing ran has no mark.
    """
    zero_ns = timeline.window.start_ns
    work = work_of(timeline, indices)
    chosen: dict[Mask, Label] = {}
    marks: list[Mark] = []
    for from_ns, until_ns, mask in walk(work.intervals, start_ns, end_ns):
        if not mask:
            continue
        if mask not in chosen:
            chosen[mask] = min((work.tiers[bit], work.labels[bit]) for bit in bits_of(mask))[1]
        label = chosen[mask]
        if marks and marks[-1].label == label and marks[-1].end_ns == from_ns - zero_ns:
            marks[-1] = Mark(label, marks[-1].start_ns, until_ns - zero_ns)
        else:
            marks.append(Mark(label, from_ns - zero_ns, until_ns - zero_ns))
    return marks


def blend_short(marks: Iterable[Mark], shortest_ns: int) -> list[Mark]:
    """Unite neighbouring marks that are shorter than `shortest_ns`.

    A united mark has the stage with most of its time. At most two marks begin in any stretch of
    `shortest_ns`.
    """
    blended: list[Mark] = []
    short: list[Mark] = []
    for mark in marks:
        long = _wall_ns(mark) >= shortest_ns
        if short and (
            long
            or mark.start_ns - short[0].start_ns >= shortest_ns
            or mark.start_ns - short[-1].end_ns >= shortest_ns
        ):
            blended.append(_unite(short))
            short = []
        if long:
            blended.append(mark)
        else:
            short.append(mark)
    return [*blended, _unite(short)] if short else blended


def _unite(marks: Sequence[Mark], at_once: int = 1) -> Mark:
    if len(marks) == 1:
        return marks[0]
    time_ns: Counter[Label] = Counter()
    for mark in marks:
        time_ns[mark.label] += _wall_ns(mark)
    start_ns, end_ns = min(mark.start_ns for mark in marks), max(mark.end_ns for mark in marks)
    return Mark(
        time_ns.most_common(1)[0][0],
        start_ns,
        end_ns,
        sum(mark.spans for mark in marks),
        max(at_once, *(mark.at_once for mark in marks)),
        any(mark.open for mark in marks),
        sum(mark.failed for mark in marks),
        # Marks that overlap or touch have no gap between them; the times of marks that are apart add up.
        max(0, end_ns - start_ns - sum(_wall_ns(mark) - mark.gaps_ns for mark in marks)),
    )


def _fit(
    drawn: _Drawn,
    window_ns: int,
    budget: int,
    thin: Callable[[_Drawn, int], _Drawn],
    count: Callable[[_Drawn], int],
) -> tuple[_Drawn, int]:
    """Thin a chart until it has at most `budget` marks. Return (chart, length in ns below which neighbours
    are united).

    This length begins at 1/2048 of the window, half a pixel of a laptop's screen. It doubles until the marks
    fit, up to an eighth of the window.
    """
    shortest_ns = 0
    for parts in (2048 >> halvings for halvings in range(9)):
        shortest_ns = window_ns // parts
        drawn = thin(drawn, shortest_ns)
        if count(drawn) <= budget:
            break
    return drawn, shortest_ns


def _wall_ns(mark: Mark) -> int:
    return mark.end_ns - mark.start_ns


def pick(count: int, limit: int, wanted: Iterable[int] = ()) -> list[int]:
    """Return the sorted indices of every k-th of `count` rows, at most `limit`. Indices in `wanted` are
    added.
    """
    every = max(1, -(-count // limit))
    return sorted({*range(0, count, every), *(index for index in wanted if index < count)})


def pick_of_each(
    rows: Sequence[_Row], group: Callable[[_Row], str], size: Callable[[_Row], float], limit: int
) -> Iterator[int]:
    """Yield the indices of the rows to draw: up to `limit` in each group, and always the group's largest
    row.
    """
    for places in grouped(range(len(rows)), lambda at: group(rows[at])).values():
        largest = max(range(len(places)), key=lambda at: size(rows[places[at]]))
        yield from (places[at] for at in pick(len(places), limit, [largest]))


MARKS = 12_000
"""Largest number of marks. A page with three times as many takes seconds to open."""
FULL_ROWS = 32
"""A role with at most this many processes has a row for each process, with a lane for each stage. In a larger
role, each process is a thin strip."""
_STRIPS = 512
"""Largest number of strips of a role. In a role with more processes, every k-th process is drawn, and the
slowest process of each stage."""


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
    """True if each process is drawn as one strip, which shows its most specific stage at each instant."""
    processes: int
    rows: tuple[Row, ...]
    """The drawn rows. There are fewer rows than `processes` if some processes are left out."""


class Gantt(msgspec.Struct, frozen=True, kw_only=True):
    window_ns: int
    groups: tuple[Group, ...]
    """The groups: first the owner's group, then the other groups in the timeline's order."""
    marks: int
    spans: int
    """Number of all spans of the step."""
    shortest_ns: int
    """Length in ns. Neighbouring marks are drawn as one mark if they are shorter than this, or nearer than
    this to each other."""


def draw_gantt(timeline: Timeline, stages: Sequence[Stage], budget: int = MARKS) -> Gantt:
    """Return the chart of one step. `stages` is the step's table of stages.

    Positions of marks are exact, except those of united marks.
    """
    slowest = {stage.slowest for stage in stages if stage.slowest is not None}
    drawn, shortest_ns = _fit(_groups(timeline, slowest), timeline.window.wall_ns, budget, _thin, _count)
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
    """Join near marks of each stage separately. Stages that share a lane never overlap."""
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
    drawn = pick(len(members), _STRIPS, wanted)
    rows = tuple(_row(timeline, members[place], spans.get(members[place], []), strips) for place in drawn)
    return Group(role=role, strips=strips, processes=len(members), rows=rows)


def _row(timeline: Timeline, index: int, spans: list[int], strip: bool) -> Row:
    process, window = timeline.processes[index], timeline.window
    lanes: tuple[tuple[Mark, ...], ...] = ()
    if process.aligned and strip:
        lanes = (tuple(_runs(timeline, spans, window.start_ns, window.end_ns)),)
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
        marks = _blocks(timeline, calls[label])
        below = max((place[caller] + 1 for caller in callers[label] if caller in place), default=0)
        free = (at for at in range(below, len(lanes)) if not _collide(lanes[at], marks))
        place[label] = next(free, max(below, len(lanes)))
        lanes += [[] for _ in range(place[label] + 1 - len(lanes))]
        lanes[place[label]] = sorted([*lanes[place[label]], *marks], key=lambda mark: mark.start_ns)
    return tuple(tuple(lane) for lane in lanes)


def _calls(
    timeline: Timeline, indices: Sequence[int]
) -> tuple[dict[Label, list[Span]], dict[Label, set[Label]]]:
    """Return the spans by stage, and the stages of the same process that called each stage directly."""
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
    """Return the stages in the order of their first calls, each after its callers.

    If stages call each other in a circle, the stage that was called first comes first.
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


_LANE_MARKS = 8_000
_LANES = 256
"""Largest number of drawn lanes. If there are more, every k-th lane is drawn, and the lanes of the slowest
trajectories."""
_SAMPLES = 240
"""Points of the curve of trajectories in flight."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory in its lane. Times are ns after the capture opened."""

    trajectory: str
    start_ns: int
    end_ns: int
    open: bool
    """True if no end of the trajectory was recorded."""
    marks: tuple[Mark, ...]
    """Stages of the trajectory over time, both work and waits: at each instant the most specific stage."""


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int
    needed: int
    """Number of lanes that all trajectories take, which is the largest number that ran at once."""
    lanes: tuple[tuple[Flight, ...], ...]
    """The drawn lanes. There are fewer lanes than `needed` if some lanes are left out."""
    in_flight: tuple[float, ...]
    """Number of trajectories that ran, on average, in each of `_SAMPLES` equal parts of the window."""
    marks: int
    shortest_ns: int
    """Length in ns. Shorter neighbouring marks are drawn as one mark."""


def pack_trajectories(
    timeline: Timeline, slowest: Iterable[str] = (), budget: int = _LANE_MARKS
) -> Lanes | None:
    """Return the lanes of a step, with the lanes of the `slowest` trajectories, or None without
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
    drawn = {slot: place for place, slot in enumerate(pick(needed, _LANES, wanted))}
    lanes: list[list[Flight]] = [[] for _ in drawn]
    for slot, flight in zip(slots, flights, strict=True):
        if slot in drawn:
            lanes[drawn[slot]].append(_marked(timeline, flight, members[flight.trajectory]))
    thin, shortest_ns = _fit([*map(tuple, lanes)], timeline.window.wall_ns, budget, _thin_lanes, _flights)
    return Lanes(
        trajectories=len(flights),
        needed=needed,
        lanes=tuple(thin),
        in_flight=tuple(_in_flight(timeline.window.wall_ns, extents)),
        marks=_flights(thin),
        shortest_ns=shortest_ns,
    )


def pack(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lane of each (start, end): the lowest lane that is free at the start.

    The intervals are sorted by start. No other choice needs fewer lanes.
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

    The trajectory lasts from the start of its span `trajectory` to the end of this span. Without this span,
    it lasts for the extent of all spans with its id.
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
    marks = _runs(timeline, indices, flight.start_ns + zero_ns, flight.end_ns + zero_ns)
    if flight.open and marks and marks[-1].end_ns == flight.end_ns:  # draw the last mark as open too
        marks[-1] = msgspec.structs.replace(marks[-1], open=True)
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
    part_ns = max(1, -(-window_ns // _SAMPLES))
    change = [0.0] * (_SAMPLES + 2)
    for start_ns, end_ns in flights:
        _add(change, start_ns / part_ns, 1)
        _add(change, end_ns / part_ns, -1)
    running, curve = 0.0, []
    for place in range(_SAMPLES):
        running += change[place]
        curve.append(max(0.0, round(running, 3)))
    return curve


def _add(change: list[float], at: float, by: int) -> None:
    """Raise the curve by `by` from the position `at` on.

    `change` holds the differences of neighbouring points. A position between two points changes both in
    proportion.
    """
    at = min(max(at, 0.0), float(_SAMPLES))
    place = int(at)
    change[place] += by * (1 - (at - place))
    change[place + 1] += by * (at - place)
