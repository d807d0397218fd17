"""The time of a step from the ends of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope_report.whatif.changes import Changes, kept
from stepscope_report.whatif.model import DriverStage, Step

ROLLOUT = "rollout"
BESIDE = "runs beside others"
"""Name of the time that stages run at once."""


class Outcome(msgspec.Struct, frozen=True):
    """A step: its stages in order, by name. What runs at once is a stage of its own, of negative time."""

    stages: tuple[tuple[str, float], ...]

    @property
    def step_ns(self) -> float:
        return sum(ns for _, ns in self.stages)


def outcome(step: Step, changes: Changes, ends_ns: Sequence[float]) -> Outcome:
    """Return the step with the trajectories that end at these times, in ns from the begin of the rollout."""
    ended = sorted(ends_ns)
    if changes.cut_tail is not None:
        ended = ended[: kept(len(ended), changes.cut_tail)]
    rollout_ns = ended[-1]
    after = list(step.after)
    if changes.overlap_reward:
        after = _scored(after, ended)
    stages = [
        *((stage.name, float(stage.wall_ns)) for stage in step.before),
        (ROLLOUT, rollout_ns),
        *((stage.name, float(stage.wall_ns)) for stage in after),
    ]
    if changes.staleness:
        stages.append((BESIDE, -_beside(step.before, rollout_ns, after)))
    return Outcome(tuple(stages))


def _scored(after: Sequence[DriverStage], ended: Sequence[float]) -> list[DriverStage]:
    """Return the stages with what is left of the reward's after the rollout.

    The trajectories are scored one after the other, as they end. Each takes the same part of the stage.
    """
    reward_ns = sum(stage.wall_ns for stage in after if stage.kind == "reward")
    done = 0.0
    for end in ended:
        done = max(done, end) + reward_ns / len(ended)
    left = (done - ended[-1]) / reward_ns
    return [
        DriverStage(stage.name, stage.kind, round(stage.wall_ns * left)) if stage.kind == "reward" else stage
        for stage in after
    ]


def _beside(before: Sequence[DriverStage], rollout_ns: float, after: Sequence[DriverStage]) -> float:
    """Return the time that the training and the next rollout run at once. Weights move while neither does."""
    generates = rollout_ns + sum(stage.wall_ns for stage in before if stage.kind != "weights")
    trains = sum(stage.wall_ns for stage in after if stage.kind != "weights")
    return min(generates, float(trains))
