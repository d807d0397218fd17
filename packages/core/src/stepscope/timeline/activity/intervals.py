"""Intervals in which anything of a kind ran: given in any order, they are merged until none overlap."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import TypeAlias

Pair: TypeAlias = tuple[float, float]
"""(start, end)."""
CHUNK = 1 << 15


class Stretches:
    """Ascending intervals that do not touch, in 16 bytes each."""

    __slots__ = ("_flat",)

    def __init__(self, ascending: Iterable[Pair] = ()) -> None:
        """Args: ascending: Intervals in the order of their starts. Those that touch become one."""
        self._flat = array("d")
        for pair in united(ascending):
            self._flat.extend(pair)

    def __bool__(self) -> bool:
        return bool(self._flat)

    def __iter__(self) -> Iterator[Pair]:
        return _unpacked(self._flat)

    @property
    def first(self) -> float:
        """Return the earliest start. There must be an interval."""
        return self._flat[0]

    @property
    def last(self) -> float:
        """Return the latest end. There must be an interval."""
        return self._flat[-1]


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
        """Return the time that is covered."""
        self._pack()
        return Stretches(merge(*map(_unpacked, self._chunks)))

    def _pack(self) -> None:
        flat = array("d")
        for pair in united(sorted(self._latest)):
            flat.extend(pair)
        self._chunks.append(flat)
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


def length(*covers: Iterable[Pair]) -> float:
    """Return the length of the union of several covers, each in the order of its starts."""
    return sum((end - start for start, end in united(merge(*covers))), 0.0)


def _unpacked(flat: array[float]) -> Iterator[Pair]:
    values = iter(flat)
    return zip(values, values, strict=True)
