"""Stated bounds of clocks hold, by simulation: hosts whose drifts, steps and message delays are known."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.report.tests.steps import MS, some
from stepscope.files.clock import DRIFT_PPM, ClockAnchor, ClockOffset, Exchange, estimate_offset
from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline.clocks import Aligned, Band, Line, Reference, align, align_owner
from stepscope_report.timeline.model import Process
from stepscope_report.timeline.rows import offset_at

US = 1_000
S = 1_000 * MS
UNIX = 1_750_000_000 * S
ROUNDED_NS = 8
Samples: TypeAlias = Literal["start", "end", "both"]


class Host(NamedTuple):
    """Clocks of one machine, at times since the opening. A step is of the wall clock alone."""

    ppm: float = 0
    skew_ns: int = 0
    step_ns: int = 0
    step_at_ns: int = 0

    def steady_ns(self, true_ns: int) -> int:
        """Return the wall clock as it would have been without the step."""
        return UNIX + self.skew_ns + true_ns + round(true_ns * self.ppm / 1_000_000)

    def wall_ns(self, true_ns: int) -> int:
        return self.steady_ns(true_ns) + (self.step_ns if true_ns >= self.step_at_ns else 0)

    def mono_ns(self, true_ns: int) -> int:
        return self.steady_ns(true_ns) - UNIX - self.skew_ns + 9 * S

    def anchor(self, true_ns: int) -> ClockAnchor:
        return ClockAnchor(wall_ns=self.wall_ns(true_ns), mono_ns=self.mono_ns(true_ns), uncertainty_ns=1)


class Delays(NamedTuple):
    """The delays of one exchange."""

    there_ns: int
    work_ns: int
    back_ns: int


def sample(owner: Host, other: Host, at_ns: int, delays: Delays) -> ClockOffset:
    heard_ns = at_ns + delays.there_ns
    answered_ns = heard_ns + delays.work_ns
    received_ns = answered_ns + delays.back_ns
    stamps = Exchange(
        owner.wall_ns(at_ns), other.wall_ns(heard_ns), other.wall_ns(answered_ns), owner.wall_ns(received_ns)
    )
    offset = some(estimate_offset([stamps]))
    return ClockOffset(
        process="p",
        offset_ns=offset.offset_ns,
        uncertainty_ns=offset.within_ns,
        at_mono_ns=owner.mono_ns(received_ns) + offset.at_ns - owner.wall_ns(received_ns),
    )


class Placed(NamedTuple):
    """A process of `other` in a step of `lasted_ns`, against the owner."""

    owner: Host
    other: Host
    lasted_ns: int
    aligned: Aligned
    closed: bool

    def worst_ns(self) -> int:
        """Return the farthest that one of its spans, or an event of its trace, is from where it was."""
        aligned = self.aligned
        opened_ns = aligned.place(self.other.mono_ns(0))
        process = Process(
            name="p", info=ProcessInfo(role="actor", rank=0, world_size=None, host="b", pid=1), owner=False,
            opened_ns=opened_ns, last_ns=opened_ns, clock=aligned.clock, spans=0, dropped=None, cost=None,
            closed_ns=aligned.place(self.other.mono_ns(self.lasted_ns)) if self.closed else None,
        )  # fmt: skip
        return max(self._apart_ns(process, self.lasted_ns * share // 100) for share in range(101))

    def _apart_ns(self, process: Process, true_ns: int) -> int:
        wall_ns, right_ns = self.other.wall_ns(true_ns), self.owner.steady_ns(true_ns)
        span_ns = self.aligned.place(self.other.mono_ns(true_ns))
        return max(abs(span_ns - right_ns), abs(wall_ns - offset_at(process, wall_ns) - right_ns))


def placed(
    owner: Host,
    other: Host,
    lasted_ns: int,
    samples: Samples,
    *,
    closed: bool = True,
    delays: tuple[Delays, Delays] = (Delays(100 * US, 0, 100 * US),) * 2,
    before_ns: int = 0,
    after_ns: int = 0,
    host: str = "b",
) -> Placed:
    begun = align_owner(owner.anchor(0), owner.anchor(lasted_ns))
    taken = []
    if samples != "end":
        taken.append(sample(owner, other, before_ns, delays[0]))
    if samples != "start":
        taken.append(sample(owner, other, lasted_ns + after_ns, delays[1]))
    reference = Reference(
        "a", begun.place, begun.clock.uncertainty_ns or 0, taken, first_ns=owner.wall_ns(0),
        last_ns=begun.place(owner.mono_ns(lasted_ns)),
        jump_ns=begun.clock.drift_ns if begun.clock.jumped else 0,
    )  # fmt: skip
    end = other.anchor(lasted_ns) if closed else None
    latest_ns = other.mono_ns(lasted_ns // 2)
    aligned = align("p", host, other.anchor(0), end, reference, latest_ns)
    return Placed(owner, other, lasted_ns, aligned, closed)


def check(one: Placed) -> None:
    within_ns = some(one.aligned.clock.uncertainty_ns)
    assert one.worst_ns() <= within_ns + ROUNDED_NS


ppms = st.floats(-DRIFT_PPM / 2, DRIFT_PPM / 2)
lengths = st.integers(10 * MS, 600 * S)
ways = st.integers(0, 5 * MS)
many_delays = st.builds(Delays, ways, st.integers(0, 3 * S), ways)
pairs_of_delays = st.tuples(many_delays, many_delays)
patterns = st.sampled_from(["start", "end", "both"])
skews = st.integers(-86_400 * S, 86_400 * S)


@pytest.mark.slow
@given(
    ppms,
    ppms,
    skews,
    lengths,
    patterns,
    st.booleans(),
    pairs_of_delays,
    st.floats(-1, 0.3),
    st.floats(-0.3, 1),
)
@settings(max_examples=150)
def test_whatever_clocks_drift_and_whenever_they_are_measured_the_bound_holds(
    owner_ppm: float, ppm: float, skew_ns: int, lasted_ns: int, samples: Samples, closed: bool,
    delays: tuple[Delays, Delays], before: float, after: float,
) -> None:  # fmt: skip
    check(
        placed(
            Host(owner_ppm), Host(ppm, skew_ns), lasted_ns, samples, closed=closed, delays=delays,
            before_ns=round(before * min(lasted_ns, S)), after_ns=round(after * min(lasted_ns, S)),
        )
    )  # fmt: skip


steps = st.one_of(st.sampled_from([-S, S, 3 * S]), st.integers(-5 * S, 5 * S))


@given(
    ppms, ppms, skews, st.integers(S, 600 * S), patterns, st.sampled_from(["owner", "other", "both"]), steps,
    steps, st.floats(0.35, 0.65), st.floats(0.35, 0.65), st.sampled_from([-S // 2, 0, S // 10]),
)  # fmt: skip
@settings(max_examples=150)
def test_a_wall_clock_that_is_set_in_the_middle_is_within_the_bound(
    owner_ppm: float, ppm: float, skew_ns: int, lasted_ns: int, samples: Samples, whose: str, one_ns: int,
    other_ns: int, one_at: float, other_at: float, before_ns: int,
) -> None:  # fmt: skip
    owner, other = Host(owner_ppm), Host(ppm, skew_ns)
    if whose != "other":
        owner = owner._replace(step_ns=one_ns, step_at_ns=round(one_at * lasted_ns))
    if whose != "owner":
        other = other._replace(step_ns=other_ns, step_at_ns=round(other_at * lasted_ns))
    check(placed(owner, other, lasted_ns, samples, before_ns=before_ns, after_ns=S // 10))


@given(ppms, steps, st.integers(S, 600 * S), st.floats(0.1, 0.9))
def test_on_the_owners_host_a_clock_that_is_set_is_within_the_bound(
    ppm: float, step_ns: int, lasted_ns: int, at: float
) -> None:
    host = Host(ppm, 0, step_ns, round(at * lasted_ns))
    one = placed(host, host, lasted_ns, "both", host="a")
    assert one.aligned.clock.alignment == "same host"
    check(one)


@pytest.mark.parametrize(
    ("lasted_ns", "ppm", "samples", "closed", "most_ns"),
    [
        (10 * S, 14, "both", True, 110 * US),
        (10 * S, 200, "both", True, 110 * US),
        (600 * S, 200, "both", True, 110 * US),
        (S, 14, "start", True, 310 * US),
        (10 * S, 14, "start", True, 2_110 * US),
        (10 * S, 14, "start", False, 2_110 * US),
        (10 * S, 14, "both", False, 300 * US),
    ],
)
def test_a_bound_is_half_the_round_trip_where_samples_bracket_the_step_and_else_grows_by_200_us_a_second(
    lasted_ns: int, ppm: float, samples: Samples, closed: bool, most_ns: int
) -> None:
    one = placed(Host(), Host(ppm, 11 * S), lasted_ns, samples, closed=closed)
    check(one)
    assert one.aligned.clock.uncertainty_ns is not None
    assert one.aligned.clock.uncertainty_ns <= most_ns


def test_a_step_that_two_samples_pin_down_costs_the_step_and_no_more() -> None:
    other = Host(14, 11 * S, step_ns=S, step_at_ns=4 * S)
    one = placed(Host(), other, 10 * S, "both")
    check(one)
    assert one.aligned.clock.uncertainty_ns is not None
    assert S <= one.aligned.clock.uncertainty_ns <= S + 400 * US


def test_an_exchange_with_long_work_counts_the_drift_during_it() -> None:
    stamps = Exchange(0, 100 * US, 100 * US + 2_999_400 * US, 3_000_200 * US)  # theirs loses 200 ppm of 3 s
    offset = some(estimate_offset([stamps]))
    assert offset.within_ns >= 100 * US


# Bands of lines that fit their bounds, and lines between clocks, for any numbers.

reach = st.integers(-(10**10), 10**10)
bounds = st.lists(st.tuples(st.floats(-0.5, 1.5), st.integers(0, 10**7), st.integers(0, 10**7)), max_size=40)


@pytest.mark.slow
@given(first_ns=reach, change_ns=st.integers(-(10**6), 10**6), bounds=bounds)
def test_no_line_that_fits_its_bounds_is_cut_off(
    first_ns: int, change_ns: int, bounds: list[tuple[float, int, int]]
) -> None:
    band = Band(1e11, 1e6)
    for at, below_ns, above_ns in bounds:
        value = first_ns + at * change_ns
        band.cut(at, value - below_ns, value + above_ns)
    assert band
    fit = band.fit()
    band.cut(0, first_ns, first_ns)
    band.cut(1, first_ns + change_ns, first_ns + change_ns)
    assert band  # the line is one of those left
    assert abs(fit.first_ns - first_ns) <= fit.within_ns
    assert abs(fit.last_ns - first_ns - change_ns) <= fit.within_ns


@given(st.floats(0, 1), reach, st.integers(10, 10**9))
def test_bounds_that_exclude_each_other_leave_no_line(at: float, value: int, apart_ns: int) -> None:
    band = Band(1e11, 1e6)
    band.cut(at, value + apart_ns, 1e12)
    band.cut(at, -1e12, value - apart_ns)
    assert not band


offsets = st.integers(-(10**11), 10**11)


@given(offsets, st.integers(-500, 500), offsets, st.integers(-500, 500), st.floats(0, 1))
def test_lines_between_three_clocks_are_consistent(
    one_ns: int, one_ppm: int, two_ns: int, two_ppm: int, at: float
) -> None:
    first_ns, last_ns = UNIX, UNIX + 100 * S
    one = Line(first_ns, last_ns, one_ns, one_ns + one_ppm * 100_000)
    two = Line(first_ns, last_ns, two_ns, two_ns + two_ppm * 100_000)
    wall_ns = first_ns + int(at * 100 * S)
    second_ns = wall_ns - one.at(wall_ns)
    third_ns = second_ns - two.at(second_ns)
    assert abs(one.then(two).at(wall_ns) - (wall_ns - third_ns)) <= 3
    back = one.inverse(first_ns, last_ns)
    assert abs(second_ns - back.at(second_ns) - wall_ns) <= 3
