"""Simulated runs for the gate: steps of five stages, without a change or with one stage slowed."""

from __future__ import annotations

import math
import random

from stepscope_report.gate import STEP, Gate, GateSteps, Limit, check_gate

SECONDS = {
    "rollout/generate": 6.0,
    "reward/score": 0.8,
    "actor/compute_log_prob": 1.2,
    "actor/update": 3.0,
    "rollout/sync_weights": 0.4,
}
STEPS = 60
NOISE = 0.04
"""Standard deviation of a stage's logarithm. A fifth of it passes on from a step to the next one."""
KEPT = 0.2
STRAGGLERS = 0.02
"""Share of the steps whose slowest trajectory makes the rollout a fifth longer."""


def simulated_run(draw: random.Random, slowed: str | None = None, by: float = 0.05) -> GateSteps:
    """Return a run of recorded steps; `slowed` takes longer by the fraction `by` in each of them."""
    moods = dict.fromkeys(SECONDS, 0.0)
    steps = []
    for _ in range(STEPS):
        for name in moods:
            moods[name] = KEPT * moods[name] + math.sqrt(1 - KEPT**2) * draw.gauss(0, NOISE)
        step = {name: seconds * math.exp(moods[name]) for name, seconds in SECONDS.items()}
        if draw.random() < STRAGGLERS:
            step["rollout/generate"] *= 1.2
        if slowed is not None:
            step[slowed] *= 1 + by
        steps.append({**step, STEP: sum(step.values())})
    return GateSteps(whole=True, recorded=steps)


def pair_gate(seed: int, slowed: str | None = None, *, limit: float = 0.02) -> Gate:
    """Return the gate of two runs, of which the second one may be slowed, for the step and each stage."""
    draw = random.Random(seed)
    a = simulated_run(draw)
    limits = [Limit(STEP, limit), Limit("*/*", limit)]
    return check_gate(a, simulated_run(draw, slowed), limits, seed)


def names_stage(gate: Gate, stage: str) -> bool:
    """Return whether the gate failed for that stage."""
    return any(check.failed for check in gate.checks if check.stage == stage)
