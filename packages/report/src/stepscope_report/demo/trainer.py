"""The main program of `stepscope demo`: GRPO with the actors of a Ray cluster. Some of its steps are
captured.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor

from stepscope import Capture, ProfileConfig, aprepare, capture, span
from stepscope.config import check_save_path
from stepscope.engines.ray import RayRollout
from stepscope.errors import ConfigError
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.rollout import RolloutReplica, play
from stepscope_report.demo.task import Batch, Trajectory, group_advantages, pad
from stepscope_report.demo.worker import ActorWorker, ReferenceWorker

ACTORS = 2
REPLICAS = 2
GROUP = 8
"""Number of attempts at each problem."""
WARM_UP = 30
"""Number of supervised updates before the first step: enough for the model to call the calculator, but not to
call it correctly."""


@dataclass(frozen=True)
class StepResult:
    reward: float
    solved: float
    """Share of the trajectories with the full reward."""
    tokens: int
    """Number of tokens that the model wrote."""
    kl: float
    seconds: float

    def __str__(self) -> str:
        quality = f"reward {self.reward:.3f}, {self.solved:.0%} solved, KL {self.kl:.3f}"
        return f"{quality}, {self.tokens:,} tokens, {self.seconds:.1f} s"


class Trainer:
    """A trainer that creates its actors in its constructor. `set_up` must be called before the
    first `step`.
    """

    def __init__(
        self,
        calculator: Calculator,
        seed: int,
        config: ProfileConfig,
        engine: str = "torch",
        replicas: int = REPLICAS,
    ) -> None:
        self.calculator = calculator
        self.rng = random.Random(seed)
        self.policy_version = 0
        self.actors = [_place(ActorWorker, rank, ACTORS, seed) for rank in range(ACTORS)]
        self.reference = _place(ReferenceWorker)
        chosen = list(islice(cycle(choices(engine)), replicas))
        self.replicas = [
            _place(self.replica_class(choice.engine), seed, config, number, python=choice.python)
            for number, choice in enumerate(chosen)
        ]
        self.engines = [
            RayRollout(replica, choice.engine) for replica, choice in zip(self.replicas, chosen, strict=True)
        ]

    def replica_class(self, engine: str) -> type:
        return replica_class(engine)

    @property
    def workers(self) -> dict[str, list[ActorHandle[Any]]]:
        """Workers that a capture records, by role. The replicas are recorded through `engines` instead."""
        return {"actor": self.actors, "ref": [self.reference]}

    async def set_up(self, warm_up: int) -> float:
        """Connect the actors, warm up the policy, and send its weights to the reference and the replicas.
        Return the supervised loss.
        """
        port = await self.actors[0].serve.remote()
        await asyncio.gather(*(actor.join.remote(port) for actor in self.actors))
        losses = await asyncio.gather(*(actor.warm_up.remote(warm_up) for actor in self.actors))
        weights = self.actors[0].sync_weights.remote()
        others = [self.reference, *self.replicas]
        await asyncio.gather(*(other.load_weights.remote(weights) for other in others))
        return fmean(losses)

    async def shut_down(self) -> None:
        """Stop the replicas, then their actors, because the processes of an engine may outlive its actor."""
        await asyncio.gather(*(replica.shut_down.remote() for replica in self.replicas))
        for actor in (*self.actors, self.reference, *self.replicas):
            ray.kill(actor)

    async def step(self, step: int) -> StepResult:
        began = time.perf_counter()
        with span("generate", role="agent_loop"):
            played = await self._rollout(step)
        with span("compute_advantages"):
            advantages = group_advantages([attempt.reward for attempt in played], GROUP)
        with span("compute_log_prob"):
            batch = await self._log_probs(played, advantages)
        with span("update_actor"):
            ranks = enumerate(self.actors)
            metrics = await asyncio.gather(*(a.update_actor.remote(batch[r::ACTORS]) for r, a in ranks))
        with span("sync_weights"):
            await self._sync_weights()
        return StepResult(
            reward=fmean(attempt.reward for attempt in played),
            solved=fmean(attempt.reward == 1 for attempt in played),
            tokens=sum(sum(attempt.actions) for attempt in played),
            kl=metrics[0]["kl"],
            seconds=time.perf_counter() - began,
        )

    async def _rollout(self, step: int) -> list[Trajectory]:
        """Make `GROUP` attempts at each problem of the step, all at once. The attempts are assigned to the
        replicas in turn.
        """
        problems = [task.make_problem(self.rng, operations) for operations in task.OPERATIONS]
        attempts = [(index, attempt) for index in range(len(problems)) for attempt in range(GROUP)]
        return await asyncio.gather(
            *(
                play(
                    f"step{step}-problem{index}-{attempt}",
                    problems[index],
                    self.replicas[attempt % REPLICAS],
                    self.calculator,
                    self.policy_version,
                )
                for index, attempt in attempts
            )
        )

    async def _log_probs(self, played: list[Trajectory], advantages: Tensor) -> Batch:
        """Compute log-probabilities: each actor for its share, and the reference for all, at the
        same time.
        """
        tokens, actions = pad(played)
        *shares, reference = await asyncio.gather(
            *(actor.compute_log_prob.remote(tokens[rank::ACTORS]) for rank, actor in enumerate(self.actors)),
            self.reference.compute_ref_log_prob.remote(tokens),
        )
        policy = torch.empty_like(reference)
        for rank, share in enumerate(shares):
            policy[rank::ACTORS] = share
        return Batch(tokens, actions, advantages, policy, reference)

    async def _sync_weights(self) -> None:
        # An object reference: the weights go from the actor straight to the replicas.
        weights = self.actors[0].sync_weights.remote()
        await asyncio.gather(*(replica.load_weights.remote(weights) for replica in self.replicas))
        self.policy_version += 1


class Choice(NamedTuple):
    """An engine, and the Python that runs the engine."""

    engine: str
    python: str | None
    """Path of the interpreter, or None for this process' Python."""


def choices(engine: str) -> list[Choice]:
    """Parse `vllm`, or `vllm=/there/bin/python,sglang=/here/bin/python`. The choices are assigned to the
    replicas in turn.
    """
    parts = [part.partition("=") for part in engine.split(",")]
    return [Choice(name.strip(), python.strip() or None) for name, _, python in parts]


_REPLICAS = {"vllm": "stepscope_vllm._demo:VllmReplica", "sglang": "stepscope_sglang._demo:SglangReplica"}
"""Class of the replica for the demo, by engine."""


def replica_class(engine: str) -> type:
    """Return the class of the replicas for `engine`: `RolloutReplica`, or the class in the engine's adapter.

    Raises:
        ConfigError: no installed package has such a class.
    """
    if engine == "torch":
        return RolloutReplica
    module, _, name = _REPLICAS.get(engine, "").partition(":")
    if not module or find_spec(module.partition(".")[0]) is None:
        fix = f"pip install 'stepscope[{engine}]'" if module else "name one of these"
        allowed = f"torch, and where they are installed, {', '.join(_REPLICAS)}"
        raise ConfigError("--engine", engine, allowed, fix)
    return cast(type, getattr(import_module(module), name))


def _place(cls: type, *args: object, python: str | None = None) -> ActorHandle[Any]:
    actor_class: Any = ray.remote(cls)
    if python is not None:
        actor_class = actor_class.options(runtime_env={"py_executable": python})
    handle: ActorHandle[Any] = actor_class.remote(*args)
    return handle


@dataclass(frozen=True)
class DemoResult:
    save_path: Path
    """Absolute path of the run's folder."""
    rewards: tuple[float, ...]
    """Mean reward of each step, from 0 to 1."""
    captured: tuple[int, ...]
    """Numbers of the captured steps."""
    seconds: float
    """Total duration in seconds, including the start of Ray."""


def run_demo(
    save_path: Path,
    *,
    steps: int = 4,
    captured: Sequence[int] = (1, 3),
    seed: int = 0,
    engine: str = "torch",
    iterations: int = 200,
    on_progress: Callable[[str], None] = print,
) -> DemoResult:
    """Train for `steps` steps, and profile the steps in `captured` into `save_path`.

    If this process is not connected to Ray, Ray is started, and shut down at the end even after an error.

    Args:
        engine: The engine that generates: `torch` (the demo's own continuous batching), or an installed
            adapter with a replica for the demo (`vllm`, `sglang`). Engines in two environments are given as
            `vllm=/there/bin/python,sglang=/here/bin/python`. Both environments need the same Ray and
            stepscope as this one.
        iterations: Forward passes that the profiler of each replica records.

    Raises:
        ConfigError: `save_path` cannot be written, or the demo has no such engine.
    """
    began = time.perf_counter()
    config = _profile(save_path.resolve(), [step for step in captured if step < steps], iterations)
    check_save_path(config, on_ray=True)  # before anything starts
    for choice in choices(engine):
        replica_class(choice.engine)
    ours = not ray.is_initialized()
    try:
        if ours:
            on_progress("starting Ray on this machine")
            start_ray()
        rewards = asyncio.run(_train(config, steps, seed, engine, on_progress))
    finally:
        if ours:
            ray.shutdown()
    selected = tuple(step for step in range(steps) if config.selects(step))
    return DemoResult(Path(config.save_path), tuple(rewards), selected, time.perf_counter() - began)


def _profile(save_path: Path, captured: Sequence[int], iterations: int) -> ProfileConfig:
    """Return a configuration that records all actors, the reference, and forward passes of each replica."""
    return ProfileConfig(
        save_path=save_path,
        steps=captured,
        roles={
            "actor": {"ranks": "all"},
            "ref": {"ranks": "all"},
            "rollout": {"ranks": "all", "engine": {"iterations": {"count": iterations}}},
        },
        budget={"fanout_seconds": 180},  # SGLang writes 90 MB when it stops: 40 s if busy
    )


def start_ray() -> None:
    """Start Ray for this process alone, whatever RAY_ADDRESS says, without dashboard and usage report."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=8,  # counted, not pinned: the actors share all cores
        include_dashboard=False,
        object_store_memory=128 * 1024**2,
        logging_level=logging.ERROR,
        log_to_driver=False,  # a worker's failure is an exception here, or in the manifest
    )


async def _train(
    config: ProfileConfig, steps: int, seed: int, engine: str, on_progress: Callable[[str], None]
) -> list[float]:
    """Run the training loop and return the mean reward of each step."""
    rewards = []
    captures: list[Capture] = []
    async with Calculator() as calculator:
        on_progress(f"placing 2 actor workers, 1 reference worker and 2 rollout replicas ({engine})")
        trainer = Trainer(calculator, seed, config, engine)
        loss = await trainer.set_up(WARM_UP)
        await aprepare(workers=trainer.workers, engines=trainer.engines, config=config)
        on_progress(f"warmed the policy up with {WARM_UP} supervised updates: loss {loss:.2f}")
        for step in range(steps):
            async with capture(step, workers=trainer.workers, engines=trainer.engines, config=config) as cap:
                result = await trainer.step(step)
            on_progress(f"step {step}: {result}{', captured' if cap.selected else ''}")
            rewards.append(result.reward)
            captures.append(cap)
        for cap in captures:
            await asyncio.to_thread(cap.result.wait)  # wait until the traces are written
        await trainer.shut_down()
    return rewards
