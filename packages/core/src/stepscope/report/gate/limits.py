"""Limits of the gate, as the command line states them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from stepscope.errors import ConfigError
from stepscope.report.gate.steps import STEP

_PERCENT = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)\s*%?")


class Limit(msgspec.Struct, frozen=True):
    """The most that a stage may grow."""

    stage: str
    """A pattern of `role/stage`, as `rollout/*`; `step` is the whole step."""
    most: float
    """Relative: 0.05 is 5 %."""


def parse_limits(fail_above: Sequence[str], stages: Sequence[str]) -> list[Limit]:
    """Return the limits of `--fail-above` and `--stage`, paired in order.

    One limit more than stages: the first one is the whole step's. One limit for several stages is each one's.

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
