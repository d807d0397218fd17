"""Savings that the critical path predicts, compared with real steps of the demo in which a stage is shorter.

The actors on Ray, the model, the batching, the agent loop, the calculator and the training are real. Each
stage also sleeps for a time set here. In each round, a step without a change is captured before a step with
each change. The critical path of the unchanged step predicts the saving: of a shorter stage on the path, of
the same stage shortened by more than parallel work allows, and of a stage off the path.

A forward pass takes a fixed time, as on its own device, and all steps have the same weights and problems. So
the load of the machine has little effect on the times.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import ray
import torch
from _measure import header, parser, table, verdict
from torch import Tensor
from what_if_demo import SPANS, PacedReplica

import stepscope_report.demo.trainer as demo
from stepscope import ProfileConfig, aprepare, capture, profile_step
from stepscope.files.layout import RunLayout
from stepscope_report.accounting import Label
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.model import token_log_probs
from stepscope_report.demo.rollout import play
from stepscope_report.demo.task import Batch, Trajectory
from stepscope_report.demo.trainer import WARM_UP, start_ray
from stepscope_report.demo.worker import ActorWorker, ReferenceWorker
from stepscope_report.spans import label_of
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.timeline.critical_path import Replay
from stepscope_report.timeline.step_graph import step_graph

ROUNDS = 5
PLAYED, TRAINED = 8, 2
"""Trajectories of a step and of its update. They are few, so that a step mostly sleeps, whatever the load."""

Rounds: TypeAlias = tuple[list[float], list[float], list[float]]
"""Seconds by round: (predicted savings, steps without the change, steps with the change)."""


class Setting(NamedTuple):
    """Times in seconds that the stages sleep."""

    tool: float = 0.5
    reference: float = 3.0
    actor: float = 1.6


class Change(NamedTuple):
    setting: Setting
    label: Label
    """The stage of which each call becomes shorter by `by_s`."""
    by_s: float


REFERENCE, ACTOR, TOOL = ("ref", "compute_ref_log_prob"), ("actor", "compute_log_prob"), ("env", "tool")
CHANGES = {
    "the reference takes 1.0 s less": Change(Setting(reference=2.0), REFERENCE, 1.0),
    "the reference takes 2.8 s less": Change(Setting(reference=0.2), REFERENCE, 2.8),
    "a tool takes 0.3 s less": Change(Setting(tool=0.2), TOOL, 0.3),
    "the actors take 1.2 s less": Change(Setting(actor=0.4), ACTOR, 1.2),
}


class PacedActor(ActorWorker):
    sleeps_s = 0.0

    @profile_step(role="actor")
    def compute_log_prob(self, tokens: Tensor) -> Tensor:
        time.sleep(self.sleeps_s)
        with torch.inference_mode():
            return token_log_probs(self.model, tokens)

    def sleep(self, seconds: float) -> None:
        self.sleeps_s = seconds


class PacedReference(ReferenceWorker):
    sleeps_s = 0.0

    @profile_step(role="ref")
    def compute_ref_log_prob(self, tokens: Tensor) -> Tensor:
        time.sleep(self.sleeps_s)
        with torch.inference_mode():
            return token_log_probs(self.model, tokens)

    def sleep(self, seconds: float) -> None:
        self.sleeps_s = seconds


class SlowCalculator:
    def __init__(self, calculator: Calculator) -> None:
        self._calculator = calculator
        self.sleeps_s = 0.0

    async def ask(self, expression: str) -> str:
        await asyncio.sleep(self.sleeps_s)
        return await self._calculator.ask(expression)


class PacedTrainer(demo.Trainer):
    """The demo's trainer, which plays the same problems with the same weights in each step."""

    def replica_class(self, engine: str) -> type:
        return PacedReplica

    async def begin(self) -> None:
        await self.set_up(WARM_UP)
        self._weights = await self.actors[0].sync_weights.remote()
        self._problems = [task.make_problem(self.rng, operations) for operations in task.OPERATIONS]
        self.slow = SlowCalculator(self.calculator)

    async def set_pace(self, setting: Setting) -> None:
        self.slow.sleeps_s = setting.tool
        await asyncio.gather(
            self.reference.sleep.remote(setting.reference),
            *(actor.sleep.remote(setting.actor) for actor in self.actors),
        )

    async def _rollout(self, step: int) -> list[Trajectory]:
        places = range(PLAYED)
        return await asyncio.gather(
            *(
                play(
                    f"{place}",
                    self._problems[place * len(self._problems) // PLAYED],
                    self.replicas[place % demo.REPLICAS],
                    self.slow,  # type: ignore[arg-type]  # has `ask`, as a Calculator
                    0,
                )
                for place in places
            )
        )

    async def _log_probs(self, played: list[Trajectory], advantages: Tensor) -> Batch:
        return await super()._log_probs(played[:TRAINED], advantages[:TRAINED])

    async def _sync_weights(self) -> None:
        await asyncio.gather(*(replica.load_weights.remote(self._weights) for replica in self.replicas))


def predicted_s(base: Timeline, change: Change) -> float:
    """Return the saving in seconds that the critical path of `base` predicts for a change."""
    calls = [span.dur_ns or 0 for span in base.spans if label_of(span) == change.label]
    left = 1 - change.by_s * 1e9 / (sum(calls) / len(calls))
    return Replay(step_graph(base)).saves_ns([change.label], left) / 1e9


async def measured(folder: Path, rounds: int) -> dict[str, Rounds]:
    config = ProfileConfig(save_path=folder, steps=["0-"], roles=SPANS)
    for name, worker in (("ActorWorker", PacedActor), ("ReferenceWorker", PacedReference)):
        setattr(demo, name, worker)  # the trainer makes actors of these classes
    results: dict[str, tuple[list[float], list[float], list[float]]] = {
        name: ([], [], []) for name in CHANGES
    }
    async with Calculator() as calculator:
        trainer = PacedTrainer(calculator, 0, config)
        await trainer.begin()
        workers: dict[str, list[Any]] = {**trainer.workers, "rollout": trainer.replicas}
        await aprepare(workers=workers, config=config)
        number = 0

        async def step(setting: Setting) -> Timeline:
            nonlocal number
            await trainer.set_pace(setting)
            async with capture(number, workers=workers, config=config) as captured:
                await trainer.step(0)
            await asyncio.to_thread(captured.result.wait)
            number += 1
            return load_step(RunLayout(folder).step(number - 1).root)

        await step(Setting())  # warms up
        for _ in range(rounds):
            for name, change in CHANGES.items():
                base, changed = await step(Setting()), await step(change.setting)
                said, bare_s, changed_s = results[name]
                said.append(predicted_s(base, change))
                bare_s.append(base.window.wall_ns / 1e9)
                changed_s.append(changed.window.wall_ns / 1e9)
        await trainer.shut_down()
    return results


def main() -> None:
    chosen = parser(__doc__).parse_args()
    logging.getLogger("stepscope").setLevel(logging.ERROR)
    start_ray()
    header("Savings that the critical path predicts", "stepscope", "torch", "ray")
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = asyncio.run(measured(Path(folder), 1 if chosen.quick else ROUNDS))
    finally:
        ray.shutdown()
    rows = []
    for name, (said, bare, changed) in results.items():
        saved = [one - other for one, other in zip(bare, changed, strict=True)]
        each = ", ".join(f"{value:.2f}" for value in saved)
        rows.append((name, f"{median(said):.2f} s", f"{median(bare) - median(changed):.2f} s", each))
    table(("change", "predicted", "saved", "by round"), rows)
    for name, (said, bare, changed) in results.items():
        off_s = abs(median(bare) - median(changed) - median(said))
        verdict(f"{name}: predicted and not saved", off_s, max(0.1 * median(said), 0.05), " s")


if __name__ == "__main__":
    main()
