"""Times of a trace in compact arrays: intervals, which are merged if they overlap, and slices, which nest."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import accumulate, islice
from math import inf
from operator import add, le, lt, sub
from typing import TypeAlias

Pair: TypeAlias = tuple[float, float]
"""(start, end)."""
CHUNK = 1 << 13
_Slice: TypeAlias = tuple[float, float, int]
"""(start, end, number of the name)."""


class Stretches:
    """Ascending intervals that do not touch each other. An interval takes 16 bytes."""

    __slots__ = ("_flat",)

    def __init__(self, ascending: Iterable[Pair] = ()) -> None:
        """
        Args:
            ascending: Intervals in order of their starts. Intervals that touch are joined.
        """
        self._flat = flat_union(ascending)

    def __bool__(self) -> bool:
        return bool(self._flat)

    def __iter__(self) -> Iterator[Pair]:
        return unpacked(self._flat)

    @property
    def first(self) -> float:
        """Return the earliest start. There must be at least one interval."""
        return self._flat[0]

    @property
    def last(self) -> float:
        """Return the latest end. There must be at least one interval."""
        return self._flat[-1]

    @property
    def length(self) -> float:
        return sum(map(sub, self._flat[1::2], self._flat[::2]), 0.0)

    def leave(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the parts of `pairs` that these intervals do not cover."""
        starts, ends = self._flat[::2], self._flat[1::2]
        for start, end in pairs:
            at = bisect_right(ends, start)
            while at < len(starts) and starts[at] < end:
                if start < starts[at]:
                    yield start, starts[at]
                start = ends[at]
                at += 1
            if start < end:
                yield start, end

    @classmethod
    def joined(cls, parts: Iterable[Stretches]) -> Stretches:
        """Return the intervals of all parts. Intervals that touch are joined."""
        whole = cls()
        for part in sorted(filter(None, parts), key=lambda part: part.first):
            whole.take(part._flat)
        return whole

    def take(self, chunk: array[float]) -> None:
        """Add ascending intervals, given as alternating starts and ends. No added interval may start before
        the first stored interval.
        """
        flat = self._flat
        if flat and chunk[0] <= flat[-1]:
            touched = 2 * bisect_left(flat[1::2], chunk[0])
            both = merge(unpacked(flat[touched:]), unpacked(chunk))
            chunk = flat_union(both)
            del flat[touched:]
        flat.extend(chunk)


class Cover:
    """Collector of intervals. An interval takes 16 bytes, or no bytes if it touches the previous interval."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._chunks: list[Stretches] = []
        self._latest: list[Pair] = []
        self._start, self._end = 0.0, -1.0

    def add(self, start: float, end: float) -> None:
        if self._start <= start <= self._end:
            if end > self._end:
                self._end = end
                self._latest[-1] = (self._start, end)
            return
        self._latest.append((start, end))
        self._start, self._end = start, end
        if len(self._latest) >= self._chunk:
            self._pack()

    def extend(self, pairs: Iterable[Pair]) -> None:
        latest, first, last = self._latest, self._start, self._end
        for pair in pairs:
            start, end = pair
            if first <= start <= last:
                if end > last:
                    last = end
                    latest[-1] = (first, end)
            else:
                latest.append(pair)
                first, last = pair
        self._start, self._end = first, last
        if len(latest) >= self._chunk:
            self._pack()

    def stretches(self) -> Stretches:
        self._pack()
        return Stretches.joined(self._chunks)

    def _pack(self) -> None:
        self._latest.sort()
        self._chunks.append(Stretches(self._latest))
        self._latest.clear()
        self._start, self._end = 0.0, -1.0


def flat_union(ascending: Iterable[Pair]) -> array[float]:
    """Join intervals that touch, and return the results as alternating starts and ends.

    Args:
        ascending: Intervals in order of their starts.
    """
    flat, rest = array("d"), iter(ascending)
    append = flat.append
    first = next(rest, None)
    if first is None:
        return flat
    start, end = first
    for begins, ends in rest:
        if begins > end:
            append(start)
            append(end)
            start, end = begins, ends
        elif ends > end:
            end = ends
    append(start)
    append(end)
    return flat


def length(pairs: Iterable[Pair]) -> float:
    return sum((end - start for start, end in pairs), 0.0)


def packed(typecode: str, values: Sequence[float]) -> bytes:
    """Return the bytes of an array of these numbers. This is three times as fast as adding each number to an
    array.
    """
    return struct.pack(f"{len(values)}{typecode}", *values)


def unpacked(flat: Iterable[float]) -> Iterator[Pair]:
    """Yield the intervals in a flat sequence of alternating starts and ends."""
    values = iter(flat)
    return zip(values, values, strict=True)


class Names:
    """Numbers for names, in the order in which the names come."""

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
    """Slices (name, start, duration) of one thread. A slice takes 20 bytes."""

    __slots__ = ("_durs", "_names", "_sorted", "_starts")

    def __init__(self) -> None:
        self._starts, self._durs, self._names = array("d"), array("d"), array("I")
        self._sorted = True

    def add(self, start: float, dur: float, name: int) -> None:
        self._starts.append(start)
        self._durs.append(dur)
        self._names.append(name)
        self._sorted = False

    def extend(self, starts: Sequence[float], durs: Sequence[float], names: Sequence[int]) -> None:
        self._starts.frombytes(packed("d", starts))
        self._durs.frombytes(packed("d", durs))
        self._names.frombytes(packed("I", names))
        self._sorted = False

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[_Slice]:
        """Yield the slices in order of their starts. If two slices have the same start, the longer comes
        first.
        """
        self._sort()
        return zip(self._starts, map(add, self._starts, self._durs), self._names, strict=True)

    def pairs(self) -> Iterator[Pair]:
        """Yield (start, end) of the slices in order of their starts."""
        self._sort()
        return zip(self._starts, map(add, self._starts, self._durs), strict=True)

    def as_added(self) -> Iterator[_Slice]:
        """Yield (start, duration, name) of the slices in order of their starts. If slices were added in that
        order, slices with the same start keep the order in which they were added.
        """
        if not all(map(le, self._starts, islice(self._starts, 1, None))):
            self._sort()
        return zip(self._starts, self._durs, self._names, strict=True)

    def _sort(self) -> None:
        starts, durs, names = self._starts, self._durs, self._names
        if not self._sorted and not all(map(lt, starts, islice(starts, 1, None))):
            order = sorted(range(len(starts)), key=lambda at: (starts[at], -durs[at]))
            self._starts = array("d", map(starts.__getitem__, order))
            self._durs = array("d", map(durs.__getitem__, order))
            self._names = array("I", map(names.__getitem__, order))
        self._sorted = True

    def open_at(self, points: Iterable[float]) -> Iterator[list[tuple[float, int]]]:
        """Yield a list of (end, name) for each point: the slices that are open then, the innermost last.

        The same list is changed and yielded for each point.

        Args:
            points: Times in ascending order.
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
    """Intervals, with a method that computes how much of another interval they cover. An interval takes 24
    bytes.
    """

    def __init__(self, ascending: Iterable[Pair] = ()) -> None:
        flat = flat_union(ascending)
        self._starts, self._ends = flat[::2], array("d", [-inf])
        """`_starts` has the start of each interval, then infinity. `_ends` has minus infinity, then the end
        of each interval."""
        self._ends.extend(flat[1::2])
        self._before = array("d", [0.0])
        """Covered time before each interval. The last value is the whole covered time."""
        self._before.extend(accumulate(map(sub, flat[1::2], self._starts)))
        self._starts.append(inf)

    def within(self, begins: Iterable[float], untils: Iterable[float]) -> Iterator[float]:
        """Yield the covered time in each interval from `begins` to `untils`.

        The intervals may come in any order, but this is fast only if most come in order of time.
        """
        starts, ends, before = self._starts, self._ends, self._before
        at, first, following = 0, -inf, starts[0]
        covered, last = before[0], ends[0]
        for begin, until in zip(begins, untils, strict=True):
            if not first <= begin < following:
                if begin < first:
                    at = bisect_right(starts, begin, 0, at)
                else:
                    at += 1
                    if starts[at] <= begin:
                        at = bisect_right(starts, begin, at)
                first, following = starts[at - 1] if at else -inf, starts[at]
                covered, last = before[at], ends[at]
            ran = covered - (last - begin) if last > begin else covered
            if until < following:
                yield (covered - (last - until) if last > until else covered) - ran
                continue
            beyond = at + 1
            if starts[beyond] <= until:
                beyond = bisect_right(starts, until, beyond)
            end = ends[beyond]
            yield (before[beyond] - (end - until) if end > until else before[beyond]) - ran
