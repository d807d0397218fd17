"""Trajectories packed into as few lanes as their overlap needs, and how many ran at each time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from stepscope_report.charts.marks import Mark, blend_short, fit, pick, runs
from stepscope_report.table import grouped
from stepscope_report.timeline import Timeline

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
    """True if no end of the trajectory was recorded."""
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
    thin, shortest_ns = fit([*map(tuple, lanes)], timeline.window.wall_ns, budget, _thin, _count)
    return Lanes(
        trajectories=len(flights),
        needed=needed,
        lanes=tuple(thin),
        in_flight=tuple(_in_flight(timeline.window.wall_ns, extents)),
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
    """Add one, or take one away, from `at` on: in the part that holds it, for the rest of that part."""
    at = min(max(at, 0.0), float(SAMPLES))
    place = int(at)
    change[place] += by * (1 - (at - place))
    change[place + 1] += by * (at - place)
