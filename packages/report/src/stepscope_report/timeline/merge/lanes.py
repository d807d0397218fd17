"""Packing of intervals into lanes in which they nest, because a viewer draws each lane as one track."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Interval(NamedTuple):
    start_ns: int
    end_ns: int
    parent: int | None
    """Index of the interval that contains it, if any."""


def pack(intervals: Sequence[Interval]) -> list[int]:
    """Return the lane of each interval, counted from 0.

    Two intervals in a lane are nested or disjoint. An interval gets its parent's lane if it fits there:
    within the parent and beside its siblings. All others get the lowest lane in which nothing runs at their
    start: intervals without a parent, children that outlive their parent, and concurrent siblings. If all
    children fit, there are as many lanes as intervals without a parent that overlap at one time.
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
