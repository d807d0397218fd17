"""Kinds of steps: what compares with what, by stages and by lengths that repeat."""

from __future__ import annotations

import random

import pytest

from stepscope.files.steps import alike, like

MS = 1_000_000


def lengths(number: int, every: int, long_ms: float, usual_ms: float, seed: int = 0) -> dict[int, int]:
    """Return the durations of steps, of which every n-th is of another length, with 10 % of noise."""
    draw = random.Random(seed)
    return {
        step: round((usual_ms if step % every else long_ms) * MS * draw.uniform(0.9, 1.1))
        for step in range(1, number)
    }


@pytest.mark.parametrize(
    ("every", "long_ms", "usual_ms"), [(10, 90, 30), (4, 160, 40), (4, 40, 160), (2, 9, 4)]
)
def test_steps_that_come_every_nth_step_compare_with_each_other(
    every: int, long_ms: float, usual_ms: float
) -> None:
    took = lengths(64, every, long_ms, usual_ms)
    step = every * 3
    del took[step]
    assert like(step, took) == {other for other in took if other % every == 0}
    assert like(step + 1, took) == {other for other in took if other % every}


def test_one_odd_length_hides_no_pattern() -> None:
    took = lengths(64, 4, 160, 40)
    took[47] = 165 * MS
    assert {4, 8, 60} <= like(100, took)
    assert not {1, 2, 3} & like(100, took)


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_lengths_without_a_pattern_are_of_one_kind(spread: float) -> None:
    odd = 0
    for seed in range(200):
        draw = random.Random(seed)
        took = {step: round(MS * draw.lognormvariate(0, spread)) for step in range(40)}
        odd += like(100, took) != set(took)
    assert odd <= 2


def test_steps_with_the_same_large_stages_are_of_one_kind() -> None:
    usual = {"rollout/generate": 6.0, "actor/update": 3.0, "trainer/log": 0.01}
    assert alike(usual, {"rollout/generate": 5.0, "actor/update": 3.5})  # a small stage does not count
    assert alike(usual, {"rollout/generate": 500.0, "actor/update": 3.0})  # a stall is in a usual step
    assert not alike(usual, {**usual, "trainer/save_checkpoint": 4.0})
    assert not alike(usual, {"actor/update": 3.0})
    assert alike({}, {})
    stages = {1: usual, 2: {**usual, "trainer/save_checkpoint": 4.0}, 3: usual}
    assert like(3, {1: 9 * MS, 2: 13 * MS}, stages) == {1}
