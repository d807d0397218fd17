"""A small real trainer on Ray: learners with torch, an async environment, two replicas; any can be lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray

from stepscope import attach, carrier, profile_step, span, trajectory, turn
from stepscope.engines.protocol import EngineProfiler
from stepscope.engines.ray import RayRollout
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

PROMPTS = 4
"""Trajectories of a step."""


class Process:
    """Methods that faults call on every actor."""

    def pid(self) -> int:
        return os.getpid()


class Learner(Process):
    """A sync actor: it computes with torch and can be kept busy."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = torch.nn.Linear(8, 8)

    @profile_step(role="actor")
    def update(self, batch: Sequence[int], carried: Mapping[str, object] | None) -> int:
        import torch

        with attach(carried), span("forward"):
            for _ in range(5):
                self.model(torch.ones(len(batch), 8)).sum().backward()
        return sum(batch)

    def be_busy(self, seconds: float) -> None:
        time.sleep(seconds)

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            self.update([1], None)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Env(Process):
    """An async actor without torch."""

    @profile_step(role="env")
    async def judge(self, answer: int, carried: Mapping[str, object] | None) -> int:
        with attach(carried):
            await asyncio.sleep(0.001)
        return answer % 7

    async def be_busy(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 # a loop that is blocked is the fault


class FakeReplica(Process):
    """An async actor whose engine's profiler has faults to switch on."""

    def __init__(self) -> None:
        self.engine = FakeEngine()

    @profile_step(role="rollout")
    async def generate(self, prompt: int, carried: Mapping[str, object] | None) -> int:
        with attach(carried):
            await self.engine.generate(3)
        return prompt + 1

    async def spoil(self, fault: str, value: object) -> None:
        setattr(self.engine, fault, value)

    async def renew(self) -> None:
        self.engine.dead = False
        self.engine.fails_to_start = self.engine.hangs_on_start = self.engine.hangs_on_stop = None

    async def be_busy(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 # likewise


class TorchReplica(Process):
    """An async actor that decodes with torch, which the engine's own profiler records."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = torch.nn.Linear(4, 4)

    async def generate(self, prompt: int, carried: Mapping[str, object] | None) -> int:
        import torch

        with attach(carried), span("decode", role="rollout"):
            for _ in range(3):
                self.model(torch.ones(1, 4))
                await asyncio.sleep(0)
        return prompt + 1

    async def be_busy(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 # likewise


def fake_profiler(engine: object, replica: int) -> EngineProfiler:
    return FakeEngineProfiler(cast(FakeEngine, engine), replica)


KINDS: dict[str, type] = {
    "learner 0": Learner,
    "learner 1": Learner,
    "env": Env,
    "replica 0": FakeReplica,
    "replica 1": TorchReplica,
}
"""Every actor by the name that faults and findings have for it."""


class Trainer:
    """The driver's side. `revive` replaces what was lost, as a fault-tolerant trainer does."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.pids: dict[str, int] = {}
        self.revive()

    def revive(self) -> None:
        """Places what is not there, and waits until all of it answers."""
        for name, kind in KINDS.items():
            if name not in self.actors:
                self.actors[name] = cast(Any, ray.remote(kind)).options(num_cpus=0).remote()
        self.pids = dict(
            zip(self.actors, ray.get([a.pid.remote() for a in self.actors.values()]), strict=True)
        )

    def drop_the_dead(self) -> list[str]:
        """Forgets the actors that are gone; returns their names."""
        answers = {name: actor.pid.remote() for name, actor in self.actors.items()}
        gone = []
        for name, answer in answers.items():
            try:
                ray.get(answer, timeout=60)
            except ray.exceptions.RayActorError:
                gone.append(name)
                del self.actors[name]
        return gone

    @property
    def workers(self) -> dict[str, list[Any]]:
        return {"actor": [self.actors["learner 0"], self.actors["learner 1"]], "env": [self.actors["env"]]}

    @property
    def engines(self) -> list[RayRollout]:
        fake = RayRollout(self.actors["replica 0"], fake_profiler, attribute="engine")
        return [fake, RayRollout(self.actors["replica 1"], "torch")]

    async def step(self, step: int) -> int:
        """One step; its result is known beforehand (`expected`)."""
        with span("rollout", role="agent_loop"):
            rewards = await asyncio.gather(*(self._play(step, index) for index in range(PROMPTS)))
        with span("update"):
            here = carrier()
            halves = rewards[::2], rewards[1::2]
            pairs = zip(self.workers["actor"], halves, strict=True)
            return sum(await asyncio.gather(*(actor.update.remote(half, here) for actor, half in pairs)))

    async def _play(self, step: int, index: int) -> int:
        replica = self.actors[f"replica {index % 2}"]
        with trajectory(f"{step}-{index}"), turn(0):
            answer = await replica.generate.remote(step + index, carrier())
            reward: int = await self.actors["env"].judge.remote(answer, carrier())
            return reward


def expected(step: int) -> int:
    return sum((step + index + 1) % 7 for index in range(PROMPTS))
