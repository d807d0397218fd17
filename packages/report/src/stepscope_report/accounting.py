"""Division of wall-clock time among nested, concurrent intervals. The shares add up exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

Label: TypeAlias = tuple[str, str]
"""(role, stage)."""
Pair: TypeAlias = tuple[int, int]
"""(start, end), in ns."""
Mask: TypeAlias = int
"""A set of bits, one for each kind of interval."""


class Interval(NamedTuple):
    start_ns: int
    end_ns: int
    above: int | None
    """Index of the parent interval, or None if there is none. Parents form no cycles."""
    bit: int
    """Index of the interval's kind, and of the bit in a mask that stands for this kind."""


class Held(NamedTuple):
    """A stretch of time in which the kinds of `mask` did nothing. `label` names the reason."""

    start_ns: int
    end_ns: int
    mask: Mask
    label: Label


class Shares(msgspec.Struct):
    """The parts of a stretch of time. `sum(wall_ns.values()) + idle_ns` is its length, to the nanosecond."""

    wall_ns: Counter[Label]
    """Time in ns attributed to each label."""
    alone_ns: Counter[Label]
    """Time in ns attributed to each label while no other label shared the time."""
    active_ns: Counter[Label]
    """Time in ns in which each label had a running leaf, whether or not the time was attributed to the
    label."""
    together_ns: Counter[tuple[Label, ...]]
    """Time in ns that two or more labels shared, by the tuple of these labels."""
    idle_ns: int
    """Time in ns in which no interval ran."""


def divide(
    intervals: Sequence[Interval],
    start_ns: int,
    end_ns: int,
    *,
    labels: Sequence[Label],
    tiers: Sequence[int],
    held: Sequence[Held] = (),
) -> Shares:
    """Divide the time from `start_ns` to `end_ns` among the labels.

    A leaf is a running interval with no running interval below it. At each instant, the leaves of the lowest
    tier count: the instant is split equally among their labels. The remainder of this division, a few
    ns, goes to the first labels by name.

    Args:
        intervals: The caller must give an end to intervals that are still open.
        start_ns: Inclusive.
        end_ns: Exclusive.
        labels: The label of each bit. Several bits may have one label.
        tiers: The tier of each bit.
        held: Disjoint stretches, in order. During a stretch, leaves of the kinds in its `mask` count for its
            `label`.
    """
    shares = Shares(Counter(), Counter(), Counter(), Counter(), idle_ns=0)
    attributed: Counter[tuple[Label, ...]] = Counter()
    for (mask, hold), ns in sweep(intervals, start_ns, end_ns, held).items():
        bits = bits_of(mask)
        if not bits:
            shares.idle_ns += ns
            continue
        now = {bit: labels[bit] if hold is None or not hold[0] >> bit & 1 else hold[1] for bit in bits}
        for label in set(now.values()):
            shares.active_ns[label] += ns
        tier = min(tiers[bit] for bit in bits)
        attributed[tuple(sorted({now[bit] for bit in bits if tiers[bit] == tier}))] += ns
    for together, ns in attributed.items():
        share, rest = divmod(ns, len(together))
        for place, label in enumerate(together):
            shares.wall_ns[label] += share + (place < rest)
        if len(together) == 1:
            shares.alone_ns[together[0]] += ns
        else:
            shares.together_ns[together] += ns
    return shares


def bits_of(mask: Mask) -> list[int]:
    """Return the bits that are set, ascending."""
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest.bit_length() - 1)
        mask ^= lowest
    return bits


def sweep(
    intervals: Sequence[Interval], start_ns: int, end_ns: int, held: Sequence[Held] = ()
) -> Mapping[tuple[Mask, tuple[Mask, Label] | None], int]:
    """Return {(kinds with a running leaf, (held kinds, their label) or None): time in ns}. Takes O(n log n)
    time.
    """
    total = Counter[tuple[Mask, tuple[Mask, Label] | None]]()
    at = 0
    for from_ns, until_ns, mask in walk(intervals, start_ns, end_ns):
        while at < len(held) and held[at].end_ns <= from_ns:
            at += 1
        place = at
        while from_ns < until_ns:
            hold = held[place] if place < len(held) and held[place].start_ns < until_ns else None
            if hold is None or hold.start_ns > from_ns:
                next_ns, key = until_ns if hold is None else hold.start_ns, None
            else:
                next_ns, key = min(hold.end_ns, until_ns), (hold.mask, hold.label)
                place += 1
            total[mask, key] += next_ns - from_ns
            from_ns = next_ns
    return total


def walk(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> Iterator[tuple[int, int, Mask]]:
    """Yield (start, end, mask of the kinds with a running leaf) in order, without gaps from `start_ns` to
    `end_ns`.
    """
    events: list[tuple[int, int]] = []
    for index, interval in enumerate(intervals):
        opens_ns, closes_ns = max(interval.start_ns, start_ns), min(interval.end_ns, end_ns)
        if opens_ns < closes_ns:
            events += ((opens_ns, index), (closes_ns, ~index))
    events.sort()
    leaves, at_ns = _Leaves(intervals), start_ns
    for time_ns, event in events:
        if time_ns > at_ns:
            yield at_ns, time_ns, leaves.mask
            at_ns = time_ns
        if event >= 0:
            leaves.open(event)
        else:
            leaves.close(~event)
    if end_ns > at_ns:
        yield at_ns, end_ns, leaves.mask


class _Leaves:
    """The kinds that have a running leaf. An interval is alive while it or any interval below it runs."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.mask: Mask = 0
        self._intervals = intervals
        self._runs = bytearray(len(intervals))
        self._alive = [0] * len(intervals)
        """For each interval: 1 while it runs, plus 1 for each interval directly below it that is alive."""
        self._count: Counter[int] = Counter()

    def open(self, index: int) -> None:
        self._runs[index] = 1
        self._alive[index] += 1
        if self._alive[index] > 1:
            return  # an interval below it is alive already
        self._gain(index)
        above = self._intervals[index].above
        while above is not None:
            self._alive[above] += 1
            if self._alive[above] > 1:
                if self._runs[above] and self._alive[above] == 2:
                    self._lose(above)
                return
            above = self._intervals[above].above

    def close(self, index: int) -> None:
        self._runs[index] = 0
        self._alive[index] -= 1
        if self._alive[index]:
            return  # an interval below it is still alive
        self._lose(index)
        above = self._intervals[index].above
        while above is not None:
            self._alive[above] -= 1
            if self._alive[above]:
                if self._runs[above] and self._alive[above] == 1:
                    self._gain(above)
                return
            above = self._intervals[above].above

    def _gain(self, index: int) -> None:
        bit = self._intervals[index].bit
        self._count[bit] += 1
        self.mask |= 1 << bit

    def _lose(self, index: int) -> None:
        bit = self._intervals[index].bit
        self._count[bit] -= 1
        if not self._count[bit]:
            self.mask ^= 1 << bit


def joined(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the union of the pairs, as disjoint pairs in order."""
    union: list[Pair] = []
    for start_ns, end_ns in sorted(pairs):
        if union and start_ns <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_ns)
        else:
            union.append((start_ns, end_ns))
    return union


def union_ns(pairs: Iterable[Pair]) -> int:
    """Return the length in ns of the time that at least one pair covers."""
    return sum(end_ns - start_ns for start_ns, end_ns in joined(pairs))


def common_ns(some: Sequence[Pair], others: Sequence[Pair]) -> int:
    """Return the length in ns of the time that both sequences cover."""
    return union_ns(some) + union_ns(others) - union_ns([*some, *others])


def outside(pairs: Iterable[Pair], holes: Iterable[Pair]) -> list[Pair]:
    """Return the parts of the pairs' union that no hole covers, in order."""
    left: list[Pair] = []
    closed, place = joined(holes), 0
    for start_ns, end_ns in joined(pairs):
        while place < len(closed) and closed[place][1] <= start_ns:
            place += 1
        at = place
        while at < len(closed) and closed[at][0] < end_ns:
            hole_ns, until_ns = closed[at]
            if hole_ns > start_ns:
                left.append((start_ns, hole_ns))
            start_ns, at = max(start_ns, until_ns), at + 1
        if start_ns < end_ns:
            left.append((start_ns, end_ns))
    return left


def clipped(pairs: Iterable[Pair], from_ns: int, until_ns: int) -> list[Pair]:
    """Return the parts of the pairs that lie between two times."""
    parts = ((max(start_ns, from_ns), min(end_ns, until_ns)) for start_ns, end_ns in pairs)
    return [(start_ns, end_ns) for start_ns, end_ns in parts if start_ns < end_ns]


def rank_of(percent: int, count: int) -> int:
    """Return the index of a percentile among `count` ascending values, by nearest rank."""
    return max(0, -(-count * percent // 100) - 1)
