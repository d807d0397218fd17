"""Properties of alignment, bands of lines and renamed ids, for any numbers."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline.clocks.align import Reference, align, align_owner
from stepscope_report.timeline.clocks.drift_bounds import Band, Line
from stepscope_report.timeline.merge.mapping import FlowIds, Place
from stepscope_report.timeline.step.rows import Axis, Row

MS = 1_000_000
S = 1_000 * MS
DAY = 86_400 * S
UNIX = 1_750_000_000 * S


@pytest.mark.slow
@given(
    skew_ns=st.integers(-DAY, DAY),
    ppm=st.integers(-200, 200),
    lasted_ns=st.integers(S, 600 * S),
    before_ns=st.integers(0, 2 * S),
    after_ns=st.integers(0, 2 * S),
    within_ns=st.tuples(st.integers(0, 5 * MS), st.integers(0, 5 * MS)),
    errors=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    at=st.floats(0, 1),
)
def test_two_samples_place_every_instant_within_the_uncertainty(
    skew_ns: int,
    ppm: int,
    lasted_ns: int,
    before_ns: int,
    after_ns: int,
    within_ns: tuple[int, int],
    errors: tuple[float, float],
    at: float,
) -> None:
    apart_ns = lasted_ns + before_ns + after_ns
    # A drift that the samples cannot show is taken for that of a disciplined clock.
    assume(
        abs(ppm) <= 15 or abs(ppm) * apart_ns // 1_000_000 > 2 * sum(within_ns) + 20 * apart_ns // 1_000_000
    )

    def wall_ns(true_ns: int) -> int:
        return UNIX + true_ns + skew_ns + true_ns * ppm // 1_000_000

    def sample(true_ns: int, number: int) -> ClockOffset:
        error_ns = int(errors[number] * within_ns[number])
        return ClockOffset(
            process="p",
            offset_ns=wall_ns(true_ns) - UNIX - true_ns + error_ns,
            uncertainty_ns=within_ns[number],
            at_mono_ns=true_ns,
        )

    def anchor(true_ns: int) -> ClockAnchor:
        return ClockAnchor(wall_ns=wall_ns(true_ns), mono_ns=9 * S + wall_ns(true_ns) - wall_ns(0))

    owner = align_owner(ClockAnchor(wall_ns=UNIX, mono_ns=0), None)
    samples = [sample(-before_ns, 0), sample(lasted_ns + after_ns, 1)]
    aligned = align("p", "there", anchor(0), anchor(lasted_ns), Reference("here", owner.place, 0, samples))
    true_ns = int(at * lasted_ns)
    assert aligned.clock.uncertainty_ns is not None
    mono_ns = 9 * S + wall_ns(true_ns) - wall_ns(0)
    # When a sample was taken is as uncertain as the sample: at 200 ppm, a microsecond in 5 ms.
    allowed_ns = aligned.clock.uncertainty_ns + max(within_ns) * 2 // 5000 + 4
    assert abs(aligned.place(mono_ns) - UNIX - true_ns) <= allowed_ns


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


ids = st.one_of(
    st.integers(0, 2**70).map(lambda number: b"%d" % number),
    st.integers(0, 2**70).map(lambda number: b'"%#x"' % number),
    st.text("abc09", max_size=6).map(msgspec.json.encode),
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), ids), unique=True, max_size=60))
def test_different_ids_of_any_files_stay_different_and_exact(ids: list[tuple[int, bytes]]) -> None:
    files = {number: FlowIds(number, 5) for number, _ in ids}
    renamed = [files[number].renamed(msgspec.Raw(text), scope="1") for number, text in ids]
    numbers = [int(bytes(text).strip(b'"'), 0) for text in renamed]
    assert all(number < 2**53 for number in numbers)
    assert len(set(numbers)) == len(ids)
    again = [files[number].renamed(msgspec.Raw(text), scope="1") for number, text in ids]
    assert [bytes(text) for text in again] == [bytes(text) for text in renamed]
    kept = [
        bytes(new).startswith(b'"') == text.startswith(b'"')
        for new, (_, text) in zip(renamed, ids, strict=True)
    ]
    assert all(kept)


@given(st.integers(0, 10**15), st.integers(0, 10**9 - 1), st.integers(-(10**12), 10**12))
def test_a_time_is_moved_with_every_digit_that_a_file_gives(us: int, below: int, shift_ns: int) -> None:
    info = ProcessInfo(role="actor", rank=0, world_size=None, host="h", pid=1)
    axis = Axis(UNIX - DAY, first=0, last=10**19, behind=0)
    place = Place(Row(info=info, process=None, clock=None), UNIX + shift_ns, axis)
    ts = f"{us}.{below:09d}"
    time = place.of(ts)
    exact = Decimal(ts) * 1000 + DAY + shift_ns
    assert time is not None
    assert Decimal(f"{time[0]}.{time[1] or 0}") == exact
