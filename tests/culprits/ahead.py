"""Rollouts in another thread, a step ahead of the training, with a culprit in some of them.

python -m tests.culprits.ahead FOLDER CULPRIT RUNS
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from pathlib import Path

from stepscope import capture, flush, profile_step, span, trajectory, turn
from tests.culprits.plan import SECONDS, Plan, sleep

TRAJECTORIES = 8
TURNS = 2
PLANTED = "t3"
"""The trajectory that has the culprit."""


@profile_step(role="trainer", stage="update")
def update() -> None:
    sleep(0.15)


async def roll_out(name: str, slow: bool) -> int:
    """Play a trajectory, and return the time that the culprit took."""
    took_ns = 0
    with trajectory(name):
        for number in range(TURNS):
            with turn(number):
                with span("generate", role="rollout"):
                    await asyncio.sleep(0.05)
                with span("tool", role="env", attrs={"name": "search"}):
                    await asyncio.sleep(0.02)
                    if slow and number:
                        began_ns = time.perf_counter_ns()
                        await asyncio.sleep(SECONDS)
                        took_ns = time.perf_counter_ns() - began_ns
    return took_ns


def roll_out_all(plan: Plan, batches: queue.Queue[int]) -> None:
    """Play the rollouts of all steps, each while the step before it trains."""
    for step in plan.steps:
        slow = step in plan.planted and plan.culprit == "slow tool of a rollout ahead"

        async def play(step: int = step, slow: bool = slow) -> int:
            names = (f"t{number}" for number in range(TRAJECTORIES))
            took = (roll_out(f"{step}-{name}", slow and name == PLANTED) for name in names)
            return sum(await asyncio.gather(*took))

        plan.add(asyncio.run(play()), step)
        batches.put(step)


def train(plan: Plan) -> None:
    plan.configure()
    batches: queue.Queue[int] = queue.Queue(maxsize=1)
    threading.Thread(target=roll_out_all, args=(plan, batches), daemon=True).start()
    for step in plan.each():
        with capture(step):
            with span("wait_batch"):
                batches.get()
            update()
            if plan.now and plan.culprit == "stage of one step":
                with plan.clocked(), span("export"):
                    time.sleep(SECONDS)
    flush(60)
    plan.write()


train(Plan(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
