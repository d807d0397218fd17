"""One rank of the part `training`: the demo's actor, reference and replica in one process, without Ray.

    python -m tools.gpu.rank FOLDER RANK STEPS GROUP DEVICE

Both ranks share the GPU, and gloo averages their gradients. Rank 0 records its whole steps with
torch.profiler. Rank 1 records its replica as an in-process engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope import ProfileConfig, aprepare, capture, span
from stepscope.engines.torch_inprocess import TorchRolloutProfiler
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.rollout import RolloutReplica, play
from stepscope_report.demo.task import Batch, Trajectory, group_advantages, pad
from stepscope_report.demo.worker import ActorWorker, ReferenceWorker
from tools.gpu.device import Device

RANKS = 2
SEED = 0
PROBLEMS = task.OPERATIONS[:14]
"""Numbers of operations of a step's problems, without the two longest problems to keep traces small."""
ITERATIONS = 60
"""Forward passes of the replica that rank 1 records."""


@dataclass
class Own:
    """Times and counts of a step that the loop takes without stepscope."""

    step: int
    wall_ms: float
    update_wall_ms: float
    update_device_ms: float
    tokens: int
    trajectories: int
    reward: float
    problems: list[str] = field(default_factory=list)
    """Problems in the manifest of the step."""


class Rank:
    def __init__(self, rank: int, group: int, device: Device) -> None:
        self.rank, self.group, self.device = rank, group, device
        self.rng = random.Random(SEED)
        self.actor = ActorWorker(rank, RANKS, SEED)
        self.reference = ReferenceWorker()
        self.replica = RolloutReplica(SEED)
        # The agent loop calls a Ray actor. This stand-in for its handle calls the replica in this process.
        handle = SimpleNamespace(generate=SimpleNamespace(remote=self.replica.generate))
        self.handle = cast(Any, handle)
        self.version = 0

    def join(self, port_file: Path) -> None:
        if self.rank == 0:
            passing = port_file.with_suffix(".part")
            passing.write_text(str(self.actor.serve()))
            passing.replace(port_file)
        until = time.monotonic() + 60
        while not port_file.exists():
            if time.monotonic() > until:
                raise TimeoutError("rank 0 did not open its store in 60 s")
            time.sleep(0.02)
        self.actor.join(int(port_file.read_text()))

    async def step(self, number: int, calculator: Calculator) -> Own:
        began = time.perf_counter()
        with span("generate", role="agent_loop"):
            played = await self._rollout(number, calculator)
        advantages = group_advantages([attempt.reward for attempt in played], self.group)
        batch = self._batch(played, advantages)
        update_began = time.perf_counter()
        with self.device.timed() as watch:
            self.actor.update_actor(batch)
        update_wall_ms = (time.perf_counter() - update_began) * 1000
        await self.sync_weights()
        return Own(
            step=number,
            wall_ms=(time.perf_counter() - began) * 1000,
            update_wall_ms=update_wall_ms,
            update_device_ms=watch.ms,
            tokens=sum(sum(attempt.actions) for attempt in played),
            trajectories=len(played),
            reward=sum(attempt.reward for attempt in played) / len(played),
        )

    async def _rollout(self, number: int, calculator: Calculator) -> list[Trajectory]:
        """Play all attempts at this rank's half of the problems concurrently."""
        problems = [task.make_problem(self.rng, operations) for operations in PROBLEMS]
        attempts = [
            play(f"step{number}-problem{index}-{attempt}", problem, self.handle, calculator, self.version)
            for index, problem in enumerate(problems)
            if index % RANKS == self.rank
            for attempt in range(self.group)
        ]
        return await asyncio.gather(*attempts)

    def _batch(self, played: list[Trajectory], advantages: Tensor) -> Batch:
        tokens, actions = pad(played)
        policy = self.actor.compute_log_prob(tokens)
        return Batch(tokens, actions, advantages, policy, self.reference.compute_ref_log_prob(tokens))

    async def sync_weights(self) -> None:
        await self.replica.load_weights(self.actor.sync_weights())
        self.version += 1


def profile(folder: Path, steps: int) -> ProfileConfig:
    """Return a configuration that captures the second and the last step."""
    return ProfileConfig.from_mapping(
        {
            "save_path": str(folder),
            "steps": sorted({1, steps - 1}),
            "roles": {
                "actor": {"ranks": [0]},
                "rollout": {
                    "ranks": "all",
                    "profiler": "off",
                    "engine": {"iterations": {"count": ITERATIONS}},
                },
                "*": {"ranks": "all"},
            },
        }
    )


async def train(folder: Path, number: int, steps: int, group: int, device: Device) -> list[Own]:
    torch.set_default_device(device.torch)  # the demo's model names no device
    rank, config = Rank(number, group, device), profile(folder, steps)
    rank.join(folder.parent / "port")
    rank.actor.warm_up(device.size(30, 4))
    rank.reference.load_weights(rank.actor.sync_weights())
    await rank.sync_weights()
    engines = [TorchRolloutProfiler(rank.replica.model, replica=0)] if number == 1 else []
    await aprepare(config=config, engines=engines, role="actor")
    owns, results = [], []
    async with Calculator() as calculator:
        for step in range(steps):
            dist.barrier()
            async with capture(step, config=config, role="actor", rank=number, engines=engines) as opened:
                own = await rank.step(step, calculator)
            print(f"rank {number}: {own}", flush=True)
            owns.append(own)
            results.append(opened.result)
        for own, result in zip(owns, results, strict=True):
            await asyncio.to_thread(result.wait, 60)
            own.problems = result.problems()
    dist.barrier()
    dist.destroy_process_group()
    return owns


def main(folder: Path, number: int, steps: int, group: int, name: str) -> None:
    device = Device(pretend=name == "cpu")
    owns = asyncio.run(train(folder, number, steps, group, device))
    (folder.parent / f"own_{number}.json").write_text(json.dumps([vars(own) for own in owns]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
