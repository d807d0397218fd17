"""Confidence intervals of relative changes: a bootstrap over steps, seeded, in pure functions.

Method: a studentised bootstrap of the logarithm of the ratio of means (Efron and Tibshirani, An Introduction
to the Bootstrap, 1993, section 12.5). Neighbouring steps resemble each other: each standard error is widened
by sqrt((1 + r) / (1 - r)), where r is the autocorrelation at lag 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple, TypeAlias

ENOUGH = 5
"""Least number of steps per side for an interval from these steps."""
NOISE = 20
"""Least number of other steps per side; with fewer, and fewer than `ENOUGH` compared steps, there is no
interval."""
RESAMPLES = 2000
CONFIDENCE = 0.95
"""The confidence of all changes of one comparison together (Bonferroni)."""
_MOST_CORRELATED = 0.9

Interval: TypeAlias = tuple[float, float]
"""Lowest and highest relative change: (0.01, 0.09) is +1 % to +9 %."""


class Sample(NamedTuple):
    """The durations of one side, in the order of its steps."""

    values: Sequence[float]
    """The values of the compared steps."""
    noise: Sequence[float] = ()
    """The values of other steps of the same run, in which nothing was changed."""


def relative_change(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the change of the mean from `a` to `b`: 0.05 is 5 % more. None if `a` is zero."""
    mean_a, mean_b = _mean(a), _mean(b)
    return mean_b / mean_a - 1 if mean_a > 0 else None


def change_interval(a: Sample, b: Sample, *, comparisons: int = 1, seed: int = 0) -> Interval | None:
    """Return the interval of the relative change from `a` to `b`; None if there are too few steps for one.

    Args:
        comparisons: Number of changes that one decision looks at.
        seed: The same seed gives the same interval.
    """
    if min(_mean(a.values), _mean(b.values)) <= 0:
        return None
    draw = random.Random(seed)
    if min(len(a.values), len(b.values)) >= ENOUGH:
        return _studentised(a.values, b.values, _tail(comparisons), draw)
    if min(len(a.noise), len(b.noise)) >= NOISE and min(_mean(a.noise), _mean(b.noise)) > 0:
        return _of_noise(a, b, _tail(comparisons), draw)
    return None


def _tail(comparisons: int) -> float:
    return (1 - CONFIDENCE) / 2 / max(comparisons, 1)


def _studentised(a: Sequence[float], b: Sequence[float], tail: float, draw: random.Random) -> Interval:
    ratio = math.log(_mean(b) / _mean(a))
    error, widened = _error(a, b), _error(a, b, _widening(a), _widening(b))
    scores = []
    for _ in range(RESAMPLES):
        resampled_a, resampled_b = draw.choices(a, k=len(a)), draw.choices(b, k=len(b))
        mean_a, mean_b = _mean(resampled_a), _mean(resampled_b)
        if min(mean_a, mean_b) > 0 and (spread := _error(resampled_a, resampled_b)) > 0:
            scores.append((math.log(mean_b / mean_a) - ratio) / spread)
    if not scores or error <= 0:
        return math.expm1(ratio), math.expm1(ratio)
    scores.sort()
    highest, lowest = _quantile(scores, 1 - tail), _quantile(scores, tail)
    return math.expm1(ratio - highest * widened), math.expm1(ratio - lowest * widened)


def _of_noise(a: Sample, b: Sample, tail: float, draw: random.Random) -> Interval:
    """Return the interval of the relative change, as wide as chance alone makes two draws of other steps, as
    many per side, differ.
    """
    ratio = math.log(_mean(b.values) / _mean(a.values))
    differences = sorted(_noise_of(b, draw) - _noise_of(a, draw) for _ in range(RESAMPLES))
    return (
        math.expm1(ratio - _quantile(differences, 1 - tail)),
        math.expm1(ratio - _quantile(differences, tail)),
    )


def _noise_of(sample: Sample, draw: random.Random) -> float:
    """Return the relative distance between the mean of randomly drawn steps and the mean of all steps.

    A step that is not in `noise` lies a little further from that mean, hence the square root.
    """
    steps = draw.choices(sample.noise, k=len(sample.values))
    return (_mean(steps) / _mean(sample.noise) - 1) * math.sqrt(1 + 1 / len(sample.noise))


def _error(a: Sequence[float], b: Sequence[float], wider_a: float = 1, wider_b: float = 1) -> float:
    """Return the standard error of the logarithm of the ratio of means, by the delta method."""
    return math.sqrt(_squared_error(a) * wider_a + _squared_error(b) * wider_b)


def _squared_error(values: Sequence[float]) -> float:
    number, mean = len(values), _mean(values)
    squares = float(sum(map(mul, values, values)))
    variance = max(squares - number * mean * mean, 0.0) / (number - 1)
    return variance / number / (mean * mean)


def _widening(values: Sequence[float]) -> float:
    """Return the factor of the variance of the mean of steps that resemble their neighbours."""
    mean = _mean(values)
    apart = [value - mean for value in values]
    whole = sum(map(mul, apart, apart))
    correlation = sum(map(mul, apart, apart[1:])) / whole if whole > 0 else 0
    correlation = min(max(correlation, 0), _MOST_CORRELATED)
    return (1 + correlation) / (1 - correlation)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(max(round(fraction * (len(ordered) - 1)), 0), len(ordered) - 1)]
