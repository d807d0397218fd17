"""The gate: limits, as the command line states them, and the verdict of each by a stage's change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import msgspec

from stepscope.errors import ConfigError
from stepscope_report.gate.interval import ENOUGH, Interval, Sample, change_interval, relative_change
from stepscope_report.gate.steps import STEP, Durations, GateSteps, like_with_like

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
    """One stage beside its limit."""

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
    """The confidence interval; None if there are too few steps."""
    a_steps: int
    b_steps: int
    source: Source
    """The steps that are compared: captured ones, or those of runs that no profiler slowed."""
    changed: bool | None
    """True if zero lies outside of the interval, or None without an interval."""
    failed: bool
    undecided: bool = False
    """True if the interval holds both zero and a change beyond the limit, so that these steps cannot tell."""
    needed_steps: int | None = None
    """Steps per side from which the interval is about as narrow as the limit; None unless undecided."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    checks: tuple[Check, ...]
    failed: bool
    undecided: bool = False
    """True if nothing failed, and the steps cannot tell for at least one limit."""


def check_gate(a: GateSteps, b: GateSteps, limits: Sequence[Limit], seed: int = 0) -> Gate:
    """Compare both sides with the limits. If several limits match a stage, the last one counts.

    Raises:
        ConfigError: a pattern matches no stage of either side, or the sides have no steps that compare.
    """
    a, b = like_with_like(a, b)
    _, one, other = _samples(STEP, a, b)
    if not (one.values and other.values):
        raise ConfigError(
            "A" if other.values else "B",
            f"{len(one.values)} and {len(other.values)} steps",
            "captured steps on both sides, or recorded ones on both",
            "capture a step of each, or set save_path, and not record: off, in both runs",
        )
    stages = sorted(a.stages() | b.stages())
    most = {stage: limit.most for limit in limits for stage in _matching(limit.stage, stages)}
    checks = tuple(_check(stage, limit, a, b, len(most), seed) for stage, limit in most.items())
    failed = any(check.failed for check in checks)
    return Gate(
        checks=checks, failed=failed, undecided=not failed and any(check.undecided for check in checks)
    )


def _matching(pattern: str, stages: Sequence[str]) -> Iterator[str]:
    matching = [STEP] if pattern == STEP else [stage for stage in stages if fnmatchcase(stage, pattern)]
    if not matching:
        more = f" and {len(stages) - _NAMED} more" if len(stages) > _NAMED else ""
        raise ConfigError(
            "--stage",
            pattern,
            f"`step`, or a pattern of role/stage; A and B have {', '.join(stages[:_NAMED]) or 'none'}{more}",
            "name one of these, or quote a pattern as 'rollout/*'",
        )
    yield from matching


def _check(stage: str, limit: float, a: GateSteps, b: GateSteps, checks: int, seed: int) -> Check:
    source, one, other = _samples(stage, a, b)
    change = relative_change(one.values, other.values)
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
    """Return the steps per side with which the interval is no wider than the limit, so that it cannot hold
    both zero and the limit. Its width falls with the square root of the steps.
    """
    if interval is None:
        return None
    width = math.log1p(interval[1]) - math.log1p(interval[0])
    return math.ceil(min(a_steps, b_steps) * (width / math.log1p(limit)) ** 2)


def _samples(stage: str, a: GateSteps, b: GateSteps) -> tuple[Source, Sample, Sample]:
    """Return the steps to compare: those without a profiler if both sides are whole runs with enough of them,
    or if a side has no captured steps; else the captured ones.
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
        ConfigError: a limit is no percentage, or their number fits no pairing.
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
