"""Slices of threads in compact arrays, and what is open at a moment or covered within a time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias

from stepscope_report.timeline.activity.intervals import Pair, Stretches, unpacked

Slice: TypeAlias = tuple[float, float, int]
"""(start, end, number of the name)."""


class Names:
    """Numbers of names, in the order in which the names come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int:
        known = self._numbers.get(name)
        if known is None:
            known = self._numbers[name] = len(self._names)
            self._names.append(name)
        return known

    def __getitem__(self, number: int) -> str:
        return self._names[number]


class Slices:
    """Slices of one thread, in 20 bytes each."""

    __slots__ = ("_ends", "_names", "_sorted", "_starts")

    def __init__(self) -> None:
        self._starts, self._ends, self._names = array("d"), array("d"), array("I")
        self._sorted = True

    def add(self, start: float, end: float, name: int) -> None:
        if self._sorted and self._starts:
            last = self._starts[-1]
            self._sorted = start > last or (start == last and end <= self._ends[-1])
        self._starts.append(start)
        self._ends.append(end)
        self._names.append(name)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Slice]:
        """Yield the slices by start. Of two with the same start, the longer one comes first."""
        starts, ends, names = self._starts, self._ends, self._names
        if not self._sorted:
            order = sorted(range(len(starts)), key=lambda at: (starts[at], -ends[at]))
            self._starts = starts = array("d", map(starts.__getitem__, order))
            self._ends = ends = array("d", map(ends.__getitem__, order))
            self._names = names = array("I", map(names.__getitem__, order))
            self._sorted = True
        return zip(starts, ends, names, strict=True)

    def open_at(self, points: Iterable[float]) -> Iterator[list[tuple[float, int]]]:
        """Yield what is open at each of the ascending points: (end, name), the innermost one last.

        The list changes with the next point.
        """
        still: list[tuple[float, int]] = []
        rest = iter(self)
        following = next(rest, None)
        for point in points:
            while following is not None and following[0] <= point:
                start, end, name = following
                while still and still[-1][0] <= start:
                    still.pop()
                still.append((end, name))
                following = next(rest, None)
            while still and still[-1][0] <= point:
                still.pop()
            yield still


class Covered:
    """Stretches of time that tell how much of an interval they cover, in 24 bytes each."""

    def __init__(self, ascending: Iterable[Pair] = ()) -> None:
        flat = array("d", (time for pair in Stretches(ascending) for time in pair))
        self.starts, self.ends = flat[::2], flat[1::2]
        self._before = array("d", [0.0])
        self._before.extend(accumulate(end - start for start, end in unpacked(flat)))

    def _until(self, point: float) -> float:
        at = bisect_right(self.starts, point)
        return self._before[at] - (max(0.0, self.ends[at - 1] - point) if at else 0.0)

    def within(self, start: float, end: float) -> float:
        """Return how much of an interval is covered."""
        return self._until(end) - self._until(start) if self.starts else 0.0

    def gaps(self, first: float, last: float) -> Iterator[Pair]:
        """Yield the intervals from `first` to `last` that are not covered."""
        at = first
        for start, end in zip(self.starts, self.ends, strict=True):
            if start > at:
                yield at, min(start, last)
            at = max(at, end)
        if at < last:
            yield at, last
