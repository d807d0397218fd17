"""Steps that a configuration selects, and spellings that it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.config import ProfileConfig, StepRange
from stepscope.config._steps import parse_ranges
from stepscope.errors import ConfigError

WINDOW = 400
"""Above all drawn starts and stops."""


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


@given(st.lists(step_ranges(), max_size=4))
def test_ranges_are_a_union(ranges: list[StepRange]) -> None:
    config = ProfileConfig(steps=ranges)
    assert {step for step in range(WINDOW) if config.selects(step)} == set().union(*map(naive, ranges))


@given(step_ranges())
def test_a_range_reads_back_as_it_is_spelled(steps: StepRange) -> None:
    assert ProfileConfig(steps=[steps.spelled]).steps == (steps,)


@given(st.lists(st.integers(0, WINDOW), unique=True))
def test_a_list_of_steps_selects_those(steps: list[int]) -> None:
    config = ProfileConfig(steps=steps)
    assert [step for step in range(WINDOW) if config.selects(step)] == sorted(set(steps) - {WINDOW})


@pytest.mark.parametrize(
    ("written", "selected"),
    [
        (2, {2}),
        ([2, "10:50:10"], {2, 10, 20, 30, 40}),
        ("2, 10:50:10", {2, 10, 20, 30, 40}),
        ([2, "1:5", 2], {1, 2, 3, 4}),
        ("every:20", {0, 20, 40}),
        ("every:1", set(range(60))),
        ("50::4", {50, 54, 58}),
        ("57:", {57, 58, 59}),
        ("7:9", {7, 8}),
        ("7-9", {7, 8, 9}),
        ("3,5,58-", {3, 5, 58, 59}),
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
        ("all", 'write "every:1"'),
        ("5:2", r"steps is '5:2'.*write 5 for that one alone, or a higher end"),
        ("5:5", r"steps is '5:5'.*above their start"),
        ("5:9:0", r"steps is '5:9:0'; allowed: strides of 1 or more"),
        ("every:0", r"steps is 'every:0'; allowed: strides of 1 or more"),
        (-1, r"steps is -1; .*count up from 0"),
        ("-1", r"steps is '-1'"),
        ("10:-1", r"steps is '10:-1'"),
        (":10", r"steps is ':10'.*10:50:10"),
        ("5-2", r"steps is '5-2'.*whose end is above their start"),
        ("1:2:3:4", r"steps is '1:2:3:4'"),
        ("soon", r'steps is \'soon\'.*write it like 7, "3-7" or "every:50"'),
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


@pytest.mark.parametrize("text", ["3", "3-7", "3,5-8", "10:50:10", "1:4, 9"])
def test_steps_and_ranks_are_spelled_alike(text: str) -> None:
    roles = ProfileConfig(steps=text, roles={"actor": {"ranks": text}})
    assert tuple(step for step in range(60) if roles.selects(step)) == roles.roles["actor"].ranks
    assert (
        tuple(rank for part in parse_ranges(text, "--ranks") for rank in part) == roles.roles["actor"].ranks
    )


@pytest.mark.parametrize("wrong", [("5", 9, 1), (5, 9.0, 1), (True, 9, 1), (5, 4, 1), (-1, 4, 1), (0, 9, 0)])
def test_a_range_made_in_python_is_checked_too(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="steps is"):
        StepRange(*wrong)


def test_an_error_lists_all_wrong_items_of_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileConfig(steps=[-1, 3, 2.5, "5:2"], roles={"actor": {"ranks": [-2, 0, "x"]}})  # type: ignore[list-item]  # wrong on purpose
    assert [error.value for error in (caught.value, *caught.value.also)] == [-1, 2.5, "5:2", -2, "x"]
