"""Intervals in which anything of a kind ran: given in any order, they are merged until none overlap."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from operator import sub
from typing import TypeAlias

Pair: TypeAlias = tuple[float, float]
"""(start, end)."""
CHUNK = 1 << 13


class Stretches:
    """Ascending intervals that do not touch, in 16 bytes each."""

    __slots__ = ("_flat",)

    def __init__(self, ascending: Iterable[Pair] = ()) -> None:
        """Args: ascending: Intervals in the order of their starts. Those that touch become one."""
        self._flat = array("d", chain.from_iterable(united(ascending)))

    def __bool__(self) -> bool:
        return bool(self._flat)

    def __iter__(self) -> Iterator[Pair]:
        return unpacked(self._flat)

    @property
    def first(self) -> float:
        """Return the earliest start. There must be an interval."""
        return self._flat[0]

    @property
    def last(self) -> float:
        """Return the latest end. There must be an interval."""
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

    def take(self, chunk: array[float]) -> None:
        """Add ascending intervals, given as alternating starts and ends. None may start before the first
        stored one.
        """
        flat = self._flat
        if flat and chunk[0] <= flat[-1]:
            touched = 2 * bisect_left(flat[1::2], chunk[0])
            both = merge(unpacked(flat[touched:]), unpacked(chunk))
            chunk = array("d", chain.from_iterable(united(both)))
            del flat[touched:]
        flat.extend(chunk)


class Cover:
    """Collector of intervals, in 16 bytes each. One that touches the latest interval takes no memory."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._chunks: list[array[float]] = []
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

    def stretches(self) -> Stretches:
        self._pack()
        covered = Stretches()
        for chunk in sorted(filter(None, self._chunks), key=lambda chunk: chunk[0]):
            covered.take(chunk)
        return covered

    def _pack(self) -> None:
        self._latest.sort()
        self._chunks.append(array("d", chain.from_iterable(united(self._latest))))
        self._latest.clear()
        self._start, self._end = 0.0, -1.0


def united(ascending: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the intervals in the order of their starts, joined where they touch."""
    rest = iter(ascending)
    for first in rest:
        start, end = first
        break
    else:
        return
    for begins, ends in rest:
        if begins > end:
            yield start, end
            start, end = begins, ends
        elif ends > end:
            end = ends
    yield start, end


def length(pairs: Iterable[Pair]) -> float:
    return sum((end - start for start, end in pairs), 0.0)


def unpacked(flat: Iterable[float]) -> Iterator[Pair]:
    """Yield the intervals in a flat sequence of alternating starts and ends."""
    values = iter(flat)
    return zip(values, values, strict=True)
