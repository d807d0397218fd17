from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stepscope_report.accounting import Interval, divide, rank_of, union_ns

LABELS = [
    ("actor", "update"),
    ("ref", "log_prob"),
    ("rollout", "decode"),
    ("actor", "update"),
    ("rollout", "queue"),
]
TIERS = [0, 0, 0, 1, 2]
WINDOW = (5, 35)


@st.composite
def forests(draw: st.DrawFn) -> list[Interval]:
    """Up to 12 intervals below one another in any way but cycles; children outlive and precede parents."""
    intervals = []
    for index in range(draw(st.integers(0, 12))):
        start_ns = draw(st.integers(0, 40))
        above = draw(st.none() | st.integers(0, index - 1)) if index else None
        end_ns = start_ns + draw(st.integers(0, 15))
        intervals.append(Interval(start_ns, end_ns, above, draw(st.integers(0, len(LABELS) - 1))))
    order = draw(st.permutations(range(len(intervals))))
    place = {old: new for new, old in enumerate(order)}
    moved = [intervals[old] for old in order]
    return [span._replace(above=None if span.above is None else place[span.above]) for span in moved]


def naive_leaves(intervals: list[Interval], at_ns: int) -> set[int]:
    """Return the kinds of the leaves in one nanosecond, by looking at everything."""
    running = {i for i, span in enumerate(intervals) if span.start_ns <= at_ns < span.end_ns}
    covered = set()
    for index in running:
        above = intervals[index].above
        while above is not None:
            covered.add(above)
            above = intervals[above].above
    return {intervals[index].bit for index in running - covered}


@given(forests())
def test_each_nanosecond_is_attributed_to_the_leaves_of_the_lowest_tier(intervals: list[Interval]) -> None:
    shares = divide(intervals, *WINDOW, labels=LABELS, tiers=TIERS)
    attributed: Counter[tuple[tuple[str, str], ...]] = Counter()
    active: Counter[tuple[str, str]] = Counter()
    for at in range(*WINDOW):
        bits = naive_leaves(intervals, at)
        active.update({LABELS[bit] for bit in bits})
        if bits:
            tier = min(TIERS[bit] for bit in bits)
            attributed[tuple(sorted({LABELS[bit] for bit in bits if TIERS[bit] == tier}))] += 1
    assert sum(shares.wall_ns.values()) + shares.idle_ns == WINDOW[1] - WINDOW[0]
    assert shares.active_ns == active
    assert {(label,): ns for label, ns in shares.alone_ns.items()} == {
        k: v for k, v in attributed.items() if len(k) == 1
    }
    assert dict(shares.together_ns) == {k: v for k, v in attributed.items() if len(k) > 1}
    for label, ns in shares.wall_ns.items():
        fair = sum(time_ns / len(together) for together, time_ns in attributed.items() if label in together)
        assert abs(ns - fair) < len(attributed)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_a_union_counts_each_nanosecond_once(pairs: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in pairs]
    assert union_ns(intervals) == len({at for start, end in intervals for at in range(start, end)})


@given(st.integers(1, 300), st.integers(1, 100))
def test_a_percentile_has_that_share_of_the_values_at_or_below_it(count: int, percent: int) -> None:
    rank = rank_of(percent, count)
    assert (rank + 1) * 100 >= percent * count
    assert rank == 0 or rank * 100 < percent * count


def test_an_empty_window_divides_into_nothing() -> None:
    shares = divide([Interval(0, 10, None, 0)], 5, 5, labels=LABELS, tiers=TIERS)
    assert (sum(shares.wall_ns.values()), shares.idle_ns) == (0, 0)
