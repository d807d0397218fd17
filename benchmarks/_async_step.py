"""An asynchronous training step: trajectories on batching engines, tools in a pool, rewards, and an update.

The concurrency is real, and sleeps stand for the work. An iteration of an engine takes longer with more
requests.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from stepscope import span, trajectory, turn

ITERATION_S, REQUEST_S = 0.004, 0.0006
"""An iteration takes ITERATION_S, and REQUEST_S for each of its requests."""
SLOTS = 12
"""The largest number of requests in an iteration."""
TOOL_S, REWARD_S, TRAIN_S, WEIGHTS_S = 0.08, 0.02, 0.8, 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a step. The defaults are the step without a change."""

    replicas: int = 2
    balance: bool = False
    wait_for: float = 1.0
    """Share of the trajectories that the training waits for."""
    tool_pool: int = 2
    staleness: bool = False
    overlap_reward: bool = False


@dataclass(frozen=True)
class Plan:
    """The turns of one trajectory, the same in every setting."""

    number: int
    tokens: Sequence[int]
    tool_s: Sequence[float]


def plans(count: int, seed: int) -> list[Plan]:
    """Return trajectories of two to four turns with a long tail of lengths. Even numbers are longer."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        scale = 45 if number % 2 else 75
        turns = draw.randint(2, 4)
        tokens = [max(5, round(scale * draw.lognormvariate(-0.2, 0.6))) for _ in range(turns)]
        made.append(Plan(number, tokens, [TOOL_S * draw.uniform(0.5, 1.5) for _ in range(turns)]))
    return made


class Engine:
    """One replica. Each running request gets a token in each iteration. Others wait for a slot."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()
        self._serving: asyncio.Task[None] | None = None

    async def generate(self, tokens: int) -> None:
        done = asyncio.Event()
        self._waiting.append((tokens, done))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        await done.wait()

    async def _serve(self) -> None:
        running: list[tuple[int, asyncio.Event]] = []
        clock = asyncio.get_running_loop().time
        ends_s = clock()
        while running or self._waiting:
            while self._waiting and len(running) < SLOTS:
                running.append(self._waiting.popleft())
            ends_s += ITERATION_S + REQUEST_S * len(running)
            await asyncio.sleep(ends_s - clock())  # a late iteration does not delay the next
            for left, done in running:
                if left == 1:
                    done.set()
            running = [(left - 1, done) for left, done in running if left > 1]


class Step:
    """One step of the loop with the given settings."""

    def __init__(self, setting: Setting, planned: Sequence[Plan]) -> None:
        self._setting, self._plans = setting, planned
        self._engines = [Engine() for _ in range(setting.replicas)]
        self._tools = asyncio.Semaphore(setting.tool_pool)
        self._scorer = asyncio.Lock()
        self._replica_of = self._balanced() if setting.balance else self._in_turn()

    async def run(self) -> None:
        """Run the rollout, the rewards, the training and the weight sync."""
        if self._setting.staleness:
            await asyncio.gather(self._rollout(), asyncio.sleep(TRAIN_S + self._scoring_s()))
        else:
            await self._rollout()
            if not self._setting.overlap_reward:
                with span("compute_reward", role="reward"):
                    await asyncio.sleep(self._scoring_s())
            with span("update_actor", role="trainer"):
                await asyncio.sleep(TRAIN_S)
        with span("sync_weights", role="trainer"):
            await asyncio.sleep(WEIGHTS_S)

    def _scoring_s(self) -> float:
        return REWARD_S * len(self._plans)

    async def _rollout(self) -> None:
        playing = [asyncio.create_task(self._play(plan)) for plan in self._plans]
        needed = -(-len(playing) * round(100 * self._setting.wait_for) // 100)
        for finished in islice(asyncio.as_completed(playing), needed):
            await finished
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, plan: Plan) -> None:
        replica = self._replica_of[plan.number]
        with trajectory(f"{plan.number}"):
            for index, (tokens, tool_s) in enumerate(zip(plan.tokens, plan.tool_s, strict=True)):
                with turn(index):
                    with span("generate", role="rollout", attrs={"replica": replica, "tokens": tokens}):
                        await self._engines[replica].generate(tokens)
                    with span("queue", role="env"):
                        await self._tools.acquire()
                    with span("tool", role="env"):
                        await asyncio.sleep(tool_s)
                    self._tools.release()
        if self._setting.overlap_reward:
            async with self._scorer:
                await asyncio.sleep(REWARD_S)

    def _in_turn(self) -> list[int]:
        return [plan.number % len(self._engines) for plan in self._plans]

    def _balanced(self) -> list[int]:
        """Assign the longest trajectories first, each to the engine with the fewest tokens."""
        loads, dealt = [0] * len(self._engines), [0] * len(self._plans)
        for plan in sorted(self._plans, key=lambda plan: -sum(plan.tokens)):
            dealt[plan.number] = min(range(len(loads)), key=loads.__getitem__)
            loads[dealt[plan.number]] += sum(plan.tokens)
        return dealt
