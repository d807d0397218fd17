"""Agents, an engine and learners on Ray, with a culprit in some of their steps.

python -m tests.culprits.on_ray FOLDER CULPRIT RUNS

The engine stands in for a real one, which preempts only under a load that two cores cannot give: it takes
away the tokens of the latest request when its cache is full, and states that as vLLM's adapter does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from stepscope import attach, capture, carrier, flush, prepare, profile_step, span, trajectory, turn
from tests.culprits.plan import SECONDS, Plan

TRAJECTORIES = 8
TURNS = 2
OTHER_HOST = "host-b"
PLANTED = "t3"
"""The trajectory that has the culprit."""
TOKENS = 10
_NEWUTS = 0x04000000


class Learner:
    def __init__(self, host: str) -> None:
        if host:  # a host of its own, to whoever asks for the name
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_NEWUTS) or libc.sethostname(host.encode(), len(host)):
                raise OSError(ctypes.get_errno(), "no host name of its own; run as root")
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    def host(self) -> str:
        return socket.gethostname()

    @profile_step(role="actor", stage="update")
    def update(self, cpu_s: float, more_s: float) -> int:
        """Work, and return the time that this took."""
        began_ns, until_s = time.perf_counter_ns(), time.thread_time() + cpu_s
        while time.thread_time() < until_s:
            sum(range(1000))
        time.sleep(0.05 + more_s)
        return time.perf_counter_ns() - began_ns


class Request:
    def __init__(self) -> None:
        self.held = 0
        self.preempted = False


class Engine:
    """Batches requests. Each takes `TOKENS` passes, and a place of the cache for each token."""

    def __init__(self) -> None:
        self.cache = TRAJECTORIES * TOKENS
        self.used = 0
        self.running: list[Request] = []
        self.freed = asyncio.Event()

    def resize(self, cache: int) -> None:
        self.cache = cache

    async def generate(self, carried: Mapping[str, object] | None) -> None:
        with attach(carried), span("request", role="rollout") as served:
            preemptions = 0
            while not await self._run(request := Request()):
                preemptions += 1
            self._free(request)
            served.set(prompt_tokens=4, output_tokens=TOKENS, preemptions=preemptions)

    async def _run(self, request: Request) -> bool:
        """Return False if the request was preempted, and lost what it had."""
        with span("queue", role="rollout"):
            while self.cache - self.used < 4:
                self.freed.clear()
                await self.freed.wait()
        self.running.append(request)
        with span("decode", role="rollout", attrs={"tokens": TOKENS}):
            for _ in range(TOKENS):
                while self.used >= self.cache and not request.preempted:
                    victim = self.running[-1]
                    victim.preempted = True
                    self._free(victim)
                if request.preempted:
                    return False
                request.held += 1
                self.used += 1
                await asyncio.sleep(0.01)
        return not request.preempted

    def _free(self, request: Request) -> None:
        self.used -= request.held
        request.held = 0
        with suppress(ValueError):
            self.running.remove(request)
        self.freed.set()

    @profile_step(role="rollout", stage="sync_weights")
    async def load_weights(self, more_s: float) -> None:
        await asyncio.sleep(0.03 + more_s)


class AgentLoop:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tools = asyncio.Semaphore(TRAJECTORIES)

    async def play(self, step: int, culprit: str, carried: Mapping[str, object] | None) -> int:
        """Play all trajectories, and return the time that the culprit took."""
        self.tools = asyncio.Semaphore(1 if culprit == "queue before the tools" else TRAJECTORIES)
        with attach(carried), span("play", role="agent_loop"):
            took = [
                self.trajectory(step, f"t{number}", culprit if f"t{number}" == PLANTED else "")
                for number in range(TRAJECTORIES)
            ]
            return sum(await asyncio.gather(*took))

    async def trajectory(self, step: int, name: str, culprit: str) -> int:
        took_ns = 0
        with trajectory(f"{step}-{name}"):
            began_ns = time.perf_counter_ns()
            for number in range(TURNS):
                with turn(number):
                    took_ns += await self.turn(culprit if number == 1 else "")
            if culprit == "long trajectory":
                began_ns = time.perf_counter_ns()
                for number in range(TURNS, TURNS + 4):
                    with turn(number):
                        await self.turn("")
                took_ns = time.perf_counter_ns() - began_ns
            with span("compute_reward", role="reward"):
                if culprit == "blocked event loop":
                    began_ns = time.perf_counter_ns()
                    time.sleep(SECONDS)  # noqa: ASYNC251 # that is the culprit
                    took_ns = time.perf_counter_ns() - began_ns
        return took_ns

    async def turn(self, culprit: str) -> int:
        with span("generate", role="rollout"):
            await self.engine.generate.remote(carrier())
        with span("queue", role="env"):
            await self.tools.acquire()
        began_ns = took_ns = 0
        with span("tool", role="env", attrs={"name": "search"}):
            await asyncio.sleep(0.03)
            if culprit == "slow tool":
                began_ns = time.perf_counter_ns()
                await asyncio.sleep(SECONDS)
                took_ns = time.perf_counter_ns() - began_ns
        self.tools.release()
        return took_ns


class Trainer:
    def __init__(self, plan: Plan) -> None:
        def actor(kind: type, *args: object) -> Any:
            return ray.remote(kind).options(num_cpus=0).remote(*args)

        self.plan = plan
        far = OTHER_HOST if plan.culprit == "slow host" else ""
        self.learners = [actor(Learner, far if rank > 1 else "") for rank in range(4)]
        self.engine = actor(Engine)
        self.loop = actor(AgentLoop, self.engine)
        self.workers = {"actor": self.learners, "rollout": [self.engine], "agent_loop": [self.loop]}
        ray.get([learner.host.remote() for learner in self.learners])

    def train(self) -> None:
        prepare(workers=self.workers)
        for step in self.plan.each():
            culprit = self.plan.culprit if self.plan.now else ""
            ray.get(self.engine.resize.remote((3 if culprit == "preemption" else TRAJECTORIES) * TOKENS))
            with cores_taken(culprit == "slow host"), capture(step, workers=self.workers):
                self.step(step, culprit)
        self.plan.write()

    def step(self, step: int, culprit: str) -> None:
        more_s = SECONDS if culprit == "slow weight transfer" else 0.0
        began_ns = time.perf_counter_ns()
        with span("rollout", role="trainer"):
            planted_ns = ray.get(self.loop.play.remote(step, culprit, carrier()))
        played_ns = time.perf_counter_ns()
        with span("update", role="trainer"):
            updated_ns = self.update(culprit)
        sent_ns = time.perf_counter_ns()
        with span("sync_weights", role="trainer"):
            ray.get(self.engine.load_weights.remote(more_s))
        took_ns = {
            "rollout": played_ns - began_ns,
            "update": updated_ns,
            "sync_weights": time.perf_counter_ns() - sent_ns,
        }
        stage = CLOCKED.get(self.plan.culprit)
        self.plan.add(planted_ns if stage is None else took_ns[stage])

    def update(self, culprit: str) -> int:
        """Return the time of the slowest learner."""
        slow = {1} if culprit == "slow rank" else set()
        cpu_s = 0.015 if self.plan.culprit == "slow host" else 0.0
        calls = [
            learner.update.remote(cpu_s, SECONDS if rank in slow else 0.0)
            for rank, learner in enumerate(self.learners)
        ]
        took_ns: list[int] = ray.get(calls)
        slowest = self.learners[took_ns.index(max(took_ns))]
        self.plan.hosts[self.plan.step] = ray.get(slowest.host.remote())
        return max(took_ns)


CLOCKED = {
    "queue before the tools": "rollout",
    "preemption": "rollout",
    "slow rank": "update",
    "slow host": "update",
    "slow weight transfer": "sync_weights",
}
"""{culprit: stage whose time tells how long it took}. The others are clocked where they are."""


@contextmanager
def cores_taken(taken: bool) -> Iterator[None]:
    """Let other processes compete for the core of the other host."""
    loop = ["sh", "-c", "while :; do :; done"]
    others = [subprocess.Popen(loop) for _ in range(16 if taken else 0)]
    for other in others:
        os.sched_setaffinity(other.pid, {max(os.sched_getaffinity(0))})
    yield
    for other in others:
        other.kill()
        other.wait()


def main(folder: Path, culprit: str, runs: int) -> None:
    os.environ.update(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    plan = Plan(folder, culprit, runs)
    plan.configure()
    Trainer(plan).train()
    left = flush()
    ray.shutdown()
    if left:
        sys.exit(str(left))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
