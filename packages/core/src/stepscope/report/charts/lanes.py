"""Trajectories packed into as few lanes as their overlap needs, and how many ran at each time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from stepscope.report.charts.marks import Mark, blend_short, fit, pick, runs
from stepscope.timeline import Timeline

MARKS = 8_000
LANES = 256
"""Lanes drawn; of more, every k-th and those of the slowest trajectories."""
SAMPLES = 240
"""Points of the curve of trajectories in flight."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory in its lane. Times are ns after the capture opened."""

    trajectory: str
    start_ns: int
    end_ns: int
    open: bool
    """It was never seen to end."""
    marks: tuple[Mark, ...]
    """Its work and its waits, one stage at a time, the most specific one."""


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int
    needed: int
    """Lanes that all of them take: how many ran at once, at most."""
    lanes: tuple[tuple[Flight, ...], ...]
    """Fewer than `needed` where not all are drawn."""
    in_flight: tuple[float, ...]
    """Number of requests that ran, on average, in each of `SAMPLES` equal parts of the window."""
    marks: int
    shortest_ns: int
    """Neighbours shorter than this are drawn as one."""


def pack_trajectories(timeline: Timeline, slowest: Iterable[str] = (), budget: int = MARKS) -> Lanes | None:
    """Return the lanes of one step; those of the `slowest` are always drawn. None without trajectories."""
    flights = _flights(timeline)
    if not flights:
        return None
    slots = pack([(start_ns, end_ns) for _, start_ns, end_ns, _, _ in flights])
    needed = max(slots) + 1
    names = set(slowest)
    wanted = [slot for slot, (name, *_) in zip(slots, flights, strict=True) if name in names]
    drawn = {slot: place for place, slot in enumerate(pick(needed, LANES, wanted))}
    lanes: list[list[Flight]] = [[] for _ in drawn]
    for slot, flight in zip(slots, flights, strict=True):
        if slot in drawn:
            lanes[drawn[slot]].append(_flight(timeline, flight))
    drawn_lanes = [tuple(lane) for lane in lanes]
    thin, shortest_ns = fit(drawn_lanes, timeline.window.wall_ns, budget, _thin, _count)
    return Lanes(
        trajectories=len(flights),
        needed=needed,
        lanes=tuple(thin),
        in_flight=tuple(_in_flight(timeline, [(start, end) for _, start, end, _, _ in flights])),
        marks=_count(thin),
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


_Extent = tuple[str, int, int, bool, list[int]]
"""(trajectory, start, end, open, its spans), in unix ns."""


def _flights(timeline: Timeline) -> list[_Extent]:
    """Return the trajectories by start.

    Each lasts from the opening of the span `trajectory` to its end, or for the extent of all spans with its
    id.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, span in enumerate(timeline.spans):
        if span.trajectory is not None and timeline.processes[span.process].aligned:
            members[span.trajectory].append(index)
    return sorted((_extent(timeline, name, indices) for name, indices in members.items()), key=lambda f: f[1])


def _extent(timeline: Timeline, name: str, indices: list[int]) -> _Extent:
    roots = [index for index in indices if timeline.spans[index].stage == "trajectory"] or indices
    spans = [timeline.spans[index] for index in roots]
    start_ns = min(span.start_ns for span in spans)
    end_ns = max(timeline.until_ns(span) for span in spans)
    return name, start_ns, end_ns, any(span.end_ns is None for span in spans), indices


def _flight(timeline: Timeline, extent: _Extent) -> Flight:
    name, start_ns, end_ns, is_open, indices = extent
    zero_ns = timeline.window.start_ns
    return Flight(
        trajectory=name,
        start_ns=start_ns - zero_ns,
        end_ns=end_ns - zero_ns,
        open=is_open,
        marks=tuple(runs(timeline, indices, start_ns, end_ns)),
    )


def _thin(lanes: Sequence[Sequence[Flight]], shortest_ns: int) -> list[tuple[Flight, ...]]:
    return [
        tuple(
            msgspec.structs.replace(flight, marks=tuple(blend_short(flight.marks, shortest_ns)))
            for flight in lane
        )
        for lane in lanes
    ]


def _count(lanes: Iterable[Iterable[Flight]]) -> int:
    return sum(len(flight.marks) for lane in lanes for flight in lane)


def _in_flight(timeline: Timeline, flights: Sequence[tuple[int, int]]) -> list[float]:
    window = timeline.window
    part_ns = max(1, -(-window.wall_ns // SAMPLES))
    change = [0.0] * (SAMPLES + 2)
    for start_ns, end_ns in flights:
        _add(change, (start_ns - window.start_ns) / part_ns, 1)
        _add(change, (end_ns - window.start_ns) / part_ns, -1)
    running, curve = 0.0, []
    for place in range(SAMPLES):
        running += change[place]
        curve.append(max(0.0, round(running, 3)))
    return curve


def _add(change: list[float], at: float, by: int) -> None:
    """Add one, or take one away, from `at` on: in the part that holds it, for the rest of that part."""
    at = min(max(at, 0.0), float(SAMPLES))
    place = int(at)
    change[place] += by * (1 - (at - place))
    change[place + 1] += by * (at - place)
