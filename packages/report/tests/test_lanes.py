"""Intervals packed into lanes: they nest, nothing wanders, and no lane is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope_report.timeline.merge.step_events import Interval, pack


@st.composite
def forests(draw: st.DrawFn) -> list[Interval]:
    """Trees as recorders leave them: parents open first; some children outlive them."""
    made: list[Interval] = []
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.none() | st.integers(0, len(made) - 1)) if made else None
        first = 0 if parent is None else made[parent].start_ns
        start_ns = first + draw(st.integers(0, 12))
        made.append(Interval(start_ns, start_ns + draw(st.integers(0, 20)), parent))
    return made


@pytest.mark.slow
@given(forests())
def test_in_a_lane_intervals_nest_or_are_apart(intervals: list[Interval]) -> None:
    lanes = pack(intervals)
    for one, (lane, a) in enumerate(zip(lanes, intervals, strict=True)):
        for other_lane, b in zip(lanes[:one], intervals[:one], strict=True):
            apart = a.end_ns <= b.start_ns or b.end_ns <= a.start_ns
            nested = (a.start_ns <= b.start_ns and b.end_ns <= a.end_ns) or (
                b.start_ns <= a.start_ns and a.end_ns <= b.end_ns
            )
            assert lane != other_lane or apart or nested


@given(forests())
def test_what_stands_inside_another_belongs_to_it(intervals: list[Interval]) -> None:
    lanes = pack(intervals)
    for one, inner in enumerate(intervals):
        ancestors = set()
        at = inner.parent
        while at is not None:
            ancestors.add(at)
            at = intervals[at].parent
        around = {
            other
            for other, outer in enumerate(intervals)
            if other != one and lanes[other] == lanes[one] and outer.start_ns < inner.start_ns < outer.end_ns
        }
        assert around <= ancestors
