"""Packs intervals into lanes in which everything nests: what a viewer draws as one track needs that."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Interval(NamedTuple):
    start_ns: int
    end_ns: int
    parent: int | None
    """Index of the interval that it belongs inside, if any."""


def pack(intervals: Sequence[Interval]) -> list[int]:
    """The lane of each interval, counted from 0.

    In a lane, two intervals are one inside the other or apart. An interval stands in its parent's lane where
    it fits: within the parent, and beside its siblings. All others (tops, children that outlive their parent,
    concurrent siblings) get a lane in which nothing runs as they start, the lowest one. If all children fit,
    the tops thus take as many lanes as ever overlap, and no more.
    """
    lanes = [-1] * len(intervals)
    stacks: list[list[int]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for index in sorted(range(len(intervals)), key=lambda at: (intervals[at].start_ns, at)):
        interval = intervals[index]
        while busy and busy[0][0] <= interval.start_ns:
            heappush(free, heappop(busy)[1])
        lane = -1 if interval.parent is None else lanes[interval.parent]
        if lane < 0 or not _fits(index, intervals, stacks[lane]):
            lane = heappop(free) if free else len(stacks)
            stacks[lane : lane + 1] = [[]]
            heappush(busy, (interval.end_ns, lane))
        stacks[lane].append(index)
        lanes[index] = lane
    return lanes


def _fits(index: int, intervals: Sequence[Interval], stack: list[int]) -> bool:
    """Return whether an interval fits in its parent's lane: the parent is innermost and ends no earlier."""
    start_ns, end_ns, parent = intervals[index]
    while stack and intervals[stack[-1]].end_ns <= start_ns:
        stack.pop()
    return bool(stack) and stack[-1] == parent and end_ns <= intervals[parent].end_ns
