"""Which steps a config selects, and which spellings it refuses."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.config import ProfileConfig, StepRange
from stepscope.errors import ConfigError

WINDOW = 400
"""Above the start of any drawn range plus the longest common period (12 * 11): no overlap begins later."""


@st.composite
def step_ranges(draw: st.DrawFn) -> StepRange:
    start = draw(st.integers(0, 60))
    length = draw(st.none() | st.integers(1, 80))
    return StepRange(start, None if length is None else start + length, draw(st.integers(1, 12)))


def naive(steps: StepRange) -> set[int]:
    return set(range(steps.start, WINDOW if steps.stop is None else steps.stop, steps.stride))


@given(step_ranges())
def test_a_range_holds_what_pythons_range_holds(steps: StepRange) -> None:
    assert {step for step in range(WINDOW) if step in steps} == naive(steps)


@given(step_ranges(), step_ranges())
def test_the_first_common_step_is_the_lowest_in_both(one: StepRange, other: StepRange) -> None:
    assert one.first_common(other) == min(naive(one) & naive(other), default=None)


@given(st.lists(step_ranges(), max_size=4))
def test_ranges_are_refused_exactly_when_two_hold_a_common_step(ranges: list[StepRange]) -> None:
    overlap = any(naive(one) & naive(other) for one, other in combinations(ranges, 2))
    try:
        ProfileConfig(steps=ranges)
    except ConfigError:
        assert overlap
    else:
        assert not overlap


@given(step_ranges())
def test_a_range_reads_back_as_it_is_spelled(steps: StepRange) -> None:
    assert ProfileConfig(steps=[steps.spelled]).steps == (steps,)


@given(st.lists(st.integers(0, WINDOW), unique=True))
def test_a_list_of_steps_selects_those(steps: list[int]) -> None:
    config = ProfileConfig(steps=steps)
    assert [step for step in range(WINDOW) if config.selects(step)] == sorted(set(steps) - {WINDOW})


def test_ranges_far_apart_are_compared_without_counting_steps() -> None:
    one, other = StepRange(0, None, 1_000_003), StepRange(1, None, 998_244_353)
    common = one.first_common(other)
    assert common is not None
    assert common > 10**12
    assert common % 1_000_003 == 0
    assert common % 998_244_353 == 1


def test_ten_thousand_single_steps_are_no_burden() -> None:
    config = ProfileConfig(steps=range(10_000))  # 50 million comparisons, were each compared with each
    assert config.selects(9_999)


@pytest.mark.parametrize(
    ("written", "selected"),
    [
        (2, {2}),
        ([2, "10:50:10"], {2, 10, 20, 30, 40}),
        ("2, 10:50:10", {2, 10, 20, 30, 40}),
        ("every:20", {0, 20, 40}),
        ("every:1", set(range(60))),
        ("50::4", {50, 54, 58}),
        ("57:", {57, 58, 59}),
        ("7:9", {7, 8}),
        (StepRange(3, 5), {3, 4}),
        ((), set()),
        ("", set()),
    ],
)
def test_steps_have_friendly_spellings(written: object, selected: set[int]) -> None:
    config = ProfileConfig.from_mapping({"steps": written})
    assert {step for step in range(60) if config.selects(step)} == selected


@pytest.mark.parametrize(
    ("written", "helps"),
    [
        ("5:2", r"steps is '5:2'.*write 5 for that step alone, or a higher stop"),
        ("5:5", r"steps is '5:5'.*above their start"),
        ("5:9:0", r"steps is '5:9:0'; allowed: strides of 1 or more"),
        ("every:0", r"steps is 'every:0'; allowed: strides of 1 or more"),
        (-1, r"steps is -1; .*count up from 0"),
        ("-1", r"steps is '-1'"),
        ("10:-1", r"steps is '10:-1'"),
        (":10", r"steps is ':10'.*start:stop:stride"),
        ("1:2:3:4", r"steps is '1:2:3:4'"),
        ("soon", r'steps is \'soon\'.*write it like 7, "10:50:10" or "every:50"'),
        ("2,,3", r"steps is ''"),
        ("²", r"steps is '²'"),
        ("9" * 5000, r"steps is '999"),
        (True, r"steps is True"),
        ([False], r"steps is False"),
        (1.5, r"steps is 1.5"),
        ([2.0], r"steps is 2.0.*whole numbers"),
        (None, r"steps is None.*\[\] captures no step"),
        ({"start": 2}, r"steps is \{'start': 2\}"),
        ([[2]], r"steps is \[2\]"),
        (b"2", r"steps is b'2'"),
    ],
)
def test_a_step_that_cannot_be_is_refused_with_its_fix(written: object, helps: str) -> None:
    with pytest.raises(ConfigError, match=helps) as caught:
        ProfileConfig.from_mapping({"steps": written})
    assert caught.value.field == "steps"


def test_all_steps_are_spelled_every_1() -> None:
    with pytest.raises(ConfigError, match='write "every:1" to capture all steps'):
        ProfileConfig(steps="all")


@pytest.mark.parametrize(
    ("steps", "helps"),
    [
        ([2, 2], "2 and 2 both hold step 2"),
        (["10:50:10", 30], "10:50:10 and 30 both hold step 30"),
        (["every:50", "20:200:30"], "every:50 and 20:200:30 both hold step 50"),
        (["every:7", "5::11"], "every:7 and 5::11 both hold step 49"),
    ],
)
def test_overlapping_ranges_name_the_first_common_step(steps: list[int | str], helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig(steps=steps)


def test_ranges_that_interleave_do_not_overlap() -> None:
    assert ProfileConfig(steps=["every:2", "1::2"]).selects(1_000_001)


@pytest.mark.parametrize("wrong", [("5", 9, 1), (5, 9.0, 1), (True, 9, 1), (5, 4, 1), (-1, 4, 1), (0, 9, 0)])
def test_a_range_made_in_python_is_checked_too(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="steps is"):
        StepRange(*wrong)
