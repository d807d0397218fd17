"""Stretches of a step in which no span ran, by the spans around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope_report.accounting import Interval, Label

GAPS = 3
"""Number of gaps that are shown, the largest first."""
LEAST = 100
"""Unaccounted time is split by gaps if it is at least one part in this many of the step."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of all stretches without a span between the same two stages."""

    before: Label | None
    """(role, stage) of the span that ended when the gap began; None if the step began then."""
    after: Label | None
    """The label of the span that began when the gap ended; None if the step ended then."""
    wall_ns: int
    count: int


class Stretch(NamedTuple):
    start_ns: int
    end_ns: int
    before: int | None
    """Index of the interval that ended when the gap began; None if the window began then."""
    after: int | None

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


def find_stretches(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> Iterator[Stretch]:
    """Yield each stretch of the window in which no interval runs, in order."""
    at_ns, before = start_ns, None
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index].start_ns):
        opens_ns, closes_ns = max(intervals[index].start_ns, start_ns), min(intervals[index].end_ns, end_ns)
        if opens_ns >= closes_ns:
            continue
        if opens_ns > at_ns:
            yield Stretch(at_ns, opens_ns, before, index)
        if closes_ns > at_ns:
            at_ns, before = closes_ns, index
    if end_ns > at_ns:
        yield Stretch(at_ns, end_ns, before, None)


def sum_up(gaps: Iterable[tuple[Label | None, Label | None, int]]) -> tuple[Gap, ...]:
    """Sum (before, after, ns) by the two stages around each gap, the longest sum first."""
    wall_ns, numbers = Counter[tuple[Label | None, Label | None]](), Counter[object]()
    for before, after, ns in gaps:
        wall_ns[before, after] += ns
        numbers[before, after] += 1
    return tuple(
        Gap(before=before, after=after, wall_ns=ns, count=numbers[before, after])
        for (before, after), ns in wall_ns.most_common()
    )


def name_gap(gap: Gap) -> str:
    """Say where the gap lies: `between actor update_actor and rollout load_weights`."""
    before, after = (None if label is None else " ".join(label) for label in (gap.before, gap.after))
    if before is None and after is None:
        return "from the step's begin to its end"
    if before is None:
        return f"before the first span, {after}"
    return f"after the last span, {before}" if after is None else f"between {before} and {after}"
