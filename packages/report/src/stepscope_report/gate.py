"""The gate of `stepscope diff`: limits for the growth of stages, checked with confidence intervals.

The interval of a change is a seeded, studentised bootstrap of the logarithm of the ratio of means (Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5). Because neighbouring steps resemble each
other, each standard error is widened by sqrt((1 + r) / (1 - r)), where r is the autocorrelation at lag 1.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from operator import mul
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout, safe
from stepscope.files.steps import alike, comparable, read_step_lines, read_uncaptured, rhythms
from stepscope_report.model import StepReport

Source: TypeAlias = Literal["captured", "unprofiled"]
_NAMED = 12
_PERCENT = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)\s*%?")


class Limit(msgspec.Struct, frozen=True):
    """The most that a stage may grow."""

    stage: str
    """A pattern of `role/stage`, as `rollout/*`; `step` is the whole step."""
    most: float
    """The largest relative growth: 0.05 is 5 %."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one stage, compared with its limit."""

    stage: str
    """`role/stage`; `step` is the whole step."""
    limit: float
    """The largest relative growth that passes: 0.05 is 5 %."""
    a_seconds: float
    b_seconds: float
    """The mean durations of both sides."""
    change: float | None
    """The relative change, or None if the mean of A is zero."""
    interval: Interval | None
    """The confidence interval, or None if there are too few steps."""
    a_steps: int
    b_steps: int
    source: Source
    """The kind of the compared steps: captured steps, or steps without a profiler."""
    changed: bool | None
    """True if zero lies outside of the interval. None if there is no interval."""
    failed: bool
    undecided: bool = False
    """True if the interval holds both zero and a change beyond the limit, so that these steps do not show
    whether the limit is kept."""
    needed_steps: int | None = None
    """Number of steps per side that makes the interval about as narrow as the limit; None unless
    `undecided`."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    checks: tuple[Check, ...]
    failed: bool
    undecided: bool = False
    """True if no check failed and at least one check is undecided."""


def check_gate(a: GateSteps, b: GateSteps, limits: Sequence[Limit], seed: int = 0) -> Gate:
    """Compare both sides with the limits. If several limits match a stage, the last limit counts.

    Raises:
        ConfigError: a pattern matches no stage with a time in the compared steps, or the sides have no
            comparable steps.
    """
    a, b = _like_with_like(a, b)
    _, one, other = _samples(STEP, a, b)
    if not (one.values and other.values):
        raise ConfigError(
            "A" if other.values else "B",
            f"{len(one.values)} and {len(other.values)} steps",
            "captured steps on both sides, or recorded ones on both",
            "capture a step of each, or set save_path, and not record: off, in both runs",
        )
    stages = list(_compared_stages(a, b))
    most = {stage: limit.most for limit in limits for stage in _matching(limit.stage, stages)}
    checks = tuple(_check(stage, limit, a, b, len(most), seed) for stage, limit in most.items())
    failed = any(check.failed for check in checks)
    return Gate(
        checks=checks, failed=failed, undecided=not failed and any(check.undecided for check in checks)
    )


def _compared_stages(a: GateSteps, b: GateSteps) -> Iterator[str]:
    """Yield the stages whose times the compared steps state. If a side has no captured steps, stages below
    other stages are left out, because the recorder's lines have only top spans.
    """
    for stage in sorted(a.stages() | b.stages()):
        _, one, other = _samples(stage, a, b)
        if one.values or other.values:
            yield stage


def _matching(pattern: str, stages: Sequence[str]) -> Iterator[str]:
    matching = [STEP] if pattern == STEP else [stage for stage in stages if fnmatchcase(stage, pattern)]
    if not matching:
        more = f" and {len(stages) - _NAMED} more" if len(stages) > _NAMED else ""
        raise ConfigError(
            "--stage",
            pattern,
            "`step`, or a pattern of role/stage; the compared steps have "
            f"{', '.join(stages[:_NAMED]) or 'none'}{more}",
            "name one of these, or quote a pattern as 'rollout/*'. Other stages need captures on both sides",
        )
    yield from matching


def _check(stage: str, limit: float, a: GateSteps, b: GateSteps, checks: int, seed: int) -> Check:
    source, one, other = _samples(stage, a, b)
    change = _relative_change(one.values, other.values)
    interval = change_interval(one, other, comparisons=checks, seed=seed)
    changed = None if interval is None else interval[0] > 0 or interval[1] < 0
    grown = sum(other.values) > 0 if change is None else change > limit
    undecided = interval is not None and limit > 0 and interval[0] <= 0 and interval[1] > limit
    return Check(
        stage=stage,
        limit=limit,
        a_seconds=sum(one.values) / max(len(one.values), 1),
        b_seconds=sum(other.values) / max(len(other.values), 1),
        change=change,
        interval=interval,
        a_steps=len(one.values),
        b_steps=len(other.values),
        source=source,
        changed=changed,
        failed=grown and changed is not False,
        undecided=undecided,
        needed_steps=_needed(interval, limit, len(one.values), len(other.values)) if undecided else None,
    )


def _needed(interval: Interval | None, limit: float, a_steps: int, b_steps: int) -> int | None:
    """Return the number of steps per side at which the interval is as narrow as the limit, and so cannot
    hold both zero and the limit. The width falls with the square root of the number of steps.
    """
    if interval is None:
        return None
    width = math.log1p(interval[1]) - math.log1p(interval[0])
    return math.ceil(min(a_steps, b_steps) * (width / math.log1p(limit)) ** 2)


def _samples(stage: str, a: GateSteps, b: GateSteps) -> tuple[Source, Sample, Sample]:
    """Return the steps to compare.

    Steps without a profiler are compared if both sides are whole runs with enough such steps, or if a side
    has no captured steps; otherwise, captured steps are compared.
    """
    quiet_a, quiet_b = a.unprofiled(stage), b.unprofiled(stage)
    enough = min(len(quiet_a), len(quiet_b)) >= ENOUGH
    if (a.whole and b.whole and enough) or not (a.captured and b.captured):
        return "unprofiled", Sample(quiet_a), Sample(quiet_b)
    return (
        "captured",
        Sample(_times(a.captured, stage), quiet_a),
        Sample(_times(b.captured, stage), quiet_b),
    )


def _times(steps: Sequence[Durations], stage: str) -> list[float]:
    return [step.get(stage, 0) for step in steps]


def parse_limits(fail_above: Sequence[str], stages: Sequence[str]) -> list[Limit]:
    """Return the limits of `--fail-above` and `--stage`, paired in order.

    If there is one limit more than stages, the first limit is for the whole step. A single limit for several
    stages is for each of them.

    Raises:
        ConfigError: a limit is no percentage, or the limits cannot be paired with the stages.
    """
    most = [_percentage(text) for text in fail_above]
    if len(most) == len(stages) + 1:
        return [Limit(STEP, most[0]), *map(Limit, stages, most[1:])]
    if len(most) == 1:
        return [Limit(stage, most[0]) for stage in stages]
    if len(most) == len(stages):
        return list(map(Limit, stages, most))
    raise ConfigError(
        "--fail-above",
        list(fail_above),
        f"one limit, one for each --stage ({len(stages)}), or one more, the first of which is the step's",
        "--fail-above 5% --stage 'rollout/*' --fail-above 10%",
    )


def _percentage(text: str) -> float:
    match = _PERCENT.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise ConfigError("--fail-above", text, "a percentage from 0 up, as 5% or 2.5", "--fail-above 5%")
    return float(match[1]) / 100


# The steps of a side.

Durations = Mapping[str, float]
"""Seconds by `role/stage`; `step` is the whole step."""
STEP = "step"
_MOST_KINDS = 50
"""Largest number of kinds of steps. With more kinds, kinds are ignored, because the stage names then contain
ids and no kind repeats."""


class GateSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the gate."""

    whole: bool
    """True if the side is a whole run. If both sides are whole runs with enough uncaptured steps, these steps
    are compared instead of captured steps."""
    captured: Sequence[Durations] = ()
    """Each stage's share of the step. The times for opening and closing the capture are not included."""
    recorded: Sequence[Durations] = ()
    """The durations in the recorder's lines. Their stages are the top spans of the process that bounds
    steps."""
    timed: Sequence[Durations] = ()
    """Uncaptured steps for which only the whole duration is known. A step of an unusual kind also has a stage
    that is named for the kind."""

    def stages(self) -> set[str]:
        """Return the names of the stages of all steps."""
        return {name for step in (*self.captured, *self.recorded) for name in step} - {STEP}

    def unprofiled(self, name: str) -> list[float]:
        """Return one stage's times in the steps without a capture. Empty if no such step states the
        stage's time.
        """
        steps = max(self.recorded, self.timed, key=len) if name == STEP else self.recorded
        return [step.get(name, 0) for step in steps] if any(name in step for step in steps) else []


def _like_with_like(a: GateSteps, b: GateSteps) -> tuple[GateSteps, GateSteps]:
    """Return both sides with equal proportions of each kind of step."""
    recorded, timed = _matched(a.recorded, b.recorded), _matched(a.timed, b.timed)
    return (
        msgspec.structs.replace(a, recorded=recorded[0], timed=timed[0]),
        msgspec.structs.replace(b, recorded=recorded[1], timed=timed[1]),
    )


def _matched(
    a: Sequence[Durations], b: Sequence[Durations]
) -> tuple[Sequence[Durations], Sequence[Durations]]:
    """Leave out steps so that each kind has the same proportion on both sides. Steps of a kind that only one
    side has are kept.
    """
    kinds = list[tuple[Durations, tuple[list[int], list[int]]]]()
    for side, steps in enumerate((a, b)):
        for at, step in enumerate(steps):
            stages = {name: seconds for name, seconds in step.items() if name != STEP}
            same = next((held for of, held in kinds if alike(of, stages)), None)
            if same is None:
                kinds.append((stages, same := ([], [])))
                if len(kinds) > _MOST_KINDS:
                    return a, b
            same[side].append(at)
    both = [held for _, held in kinds if held[0] and held[1]]
    if len(both) < 2:
        return a, b
    more_a = max(1, min(len(of_a) // len(of_b) for of_a, of_b in both))
    more_b = max(1, min(len(of_b) // len(of_a) for of_a, of_b in both))
    left_out: tuple[set[int], set[int]] = (set(), set())
    for of_a, of_b in both:
        number = min(len(of_a) // more_a, len(of_b) // more_b)
        left_out[0].update(of_a[: len(of_a) - number * more_a])
        left_out[1].update(of_b[: len(of_b) - number * more_b])
    return _without(a, left_out[0]), _without(b, left_out[1])


def _without(steps: Sequence[Durations], left_out: Set[int]) -> list[Durations]:
    return [step for at, step in enumerate(steps) if at not in left_out]


def read_gate_steps(
    folder: Path,
    run: str,
    reports: Sequence[StepReport],
    wanted: Callable[[int], bool],
    *,
    whole: bool,
) -> GateSteps:
    """Return the steps of a side.

    Args:
        folder: The run's folder.
        run: The id of the run whose steps count.
        reports: The reports of the captured steps.
        wanted: Returns whether the uncaptured step with this number counts.
        whole: True if the side is a whole run.
    """
    layout = RunLayout(folder)
    return GateSteps(
        whole=whole,
        captured=[_of_report(report) for report in reports],
        recorded=list(_recorded(layout, run, wanted)),
        timed=_timed(layout, run, wanted),
    )


def _of_report(report: StepReport) -> Durations:
    shares = {
        f"{line.role}/{line.stage}" if line.kind == "stage" else line.kind: line.wall_ns / 1e9
        for line in report.breakdown.lines
        if line.kind != "profiler"
    }
    return {**shares, STEP: report.breakdown.window_ns / 1e9}


def _recorded(layout: RunLayout, run: str, wanted: Callable[[int], bool]) -> Iterator[Durations]:
    lines = read_step_lines(layout.step_lines(run))[1:]  # the first step of a run warms up
    for line in lines:
        if wanted(line.step) and not line.captured and line.error is None and line.dur_ns > 0:
            yield {**line.stages, STEP: line.dur_ns / 1e9}


def _timed(layout: RunLayout, run: str, wanted: Callable[[int], bool]) -> list[Durations]:
    """Return the duration of each uncaptured step, by step number. If several owners timed a step, the
    slowest owner counts.
    """
    slowest: dict[int, int] = defaultdict(int)
    for path in layout.uncaptured_files():
        if path.stem.endswith(f"_{safe(run)}"):
            for step in comparable(read_uncaptured(path)):
                slowest[step.step] = max(slowest[step.step], step.dur_ns)
    took = {step: ns for step, ns in sorted(slowest.items()) if wanted(step) and ns > 0}
    apart = {step: f"kind {at}" for at, (group, _) in enumerate(rhythms(took)) for step in group}
    return [
        {STEP: ns / 1e9, **({apart[step]: ns / 1e9} if step in apart else {})} for step, ns in took.items()
    ]


# Confidence intervals.

ENOUGH = 5
"""Least number of compared steps per side for an interval from these steps alone."""
NOISE = 20
"""Least number of other steps per side for an interval if there are fewer than `ENOUGH` compared steps."""
_RESAMPLES = 2000
_CONFIDENCE = 0.95
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


def _relative_change(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the change of the mean from `a` to `b`: 0.05 is 5 % more. None if `a` is zero."""
    mean_a, mean_b = _mean(a), _mean(b)
    return mean_b / mean_a - 1 if mean_a > 0 else None


def change_interval(a: Sample, b: Sample, *, comparisons: int = 1, seed: int = 0) -> Interval | None:
    """Return the interval of the relative change from `a` to `b`, or None if there are too few steps.

    Args:
        comparisons: Number of changes on which one decision is based.
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
    return (1 - _CONFIDENCE) / 2 / max(comparisons, 1)


def _studentised(a: Sequence[float], b: Sequence[float], tail: float, draw: random.Random) -> Interval:
    ratio = math.log(_mean(b) / _mean(a))
    error, widened = _error(a, b), _error(a, b, _widening(a), _widening(b))
    scores = []
    for _ in range(_RESAMPLES):
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
    """Return the interval of the relative change, with a width that comes from both samples' `noise`.

    From the `noise` of each side, as many steps are drawn at random as are compared. The draw is repeated.
    The width is the spread of the differences between the two sides' means.
    """
    ratio = math.log(_mean(b.values) / _mean(a.values))
    differences = sorted(_noise_of(b, draw) - _noise_of(a, draw) for _ in range(_RESAMPLES))
    return (
        math.expm1(ratio - _quantile(differences, 1 - tail)),
        math.expm1(ratio - _quantile(differences, tail)),
    )


def _noise_of(sample: Sample, draw: random.Random) -> float:
    """Return the relative distance between the mean of randomly drawn steps and the mean of all steps.

    The square root corrects for the compared steps, which are not in `noise` and so lie a little further from
    its mean.
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
    """Return the factor by which resemblance between neighbouring steps increases the variance of
    their mean.
    """
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
