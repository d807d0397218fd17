"""Wall time of a captured step, compared with the step between start() and stop() of torch.profiler by hand.

The first kind of step is many small torch operators in one process, the second an update of the demo's actors
on Ray. By hand, the driver starts and stops the actors' profilers with Ray calls. Writing a capture's files,
and dropping the trace by hand, is not in the time; each is over before the next step. All contenders take
turns in the same processes.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from _measure import arguments, header, interleaved, ratio_interval, table, verdict

from stepscope import capture, configure, prepare, span
from stepscope._recording.capture.capture import Capture
from stepscope_report.demo.task import VOCABULARY, Batch
from stepscope_report.demo.trainer import start_ray
from stepscope_report.demo.worker import ActorWorker, ReferenceWorker

OPERATORS = 5000
SEQUENCES = 64
"""Number of sequences in the batch on which the actors train."""
ROUNDS = 21
PARTS = ("open", "body", "close")
NOTHING, HAND, OURS = "no profiler", "torch.profiler by hand", "capture"
_numbers = count(1)


def train(operators: int) -> None:
    value = torch.ones(16)
    for _ in range(operators):
        value = value * 0.5 + 1


class Steps:
    """Steps of many small operators, with and without a profiler. Each part of a step is timed."""

    def __init__(self, operators: int) -> None:
        self.operators = operators
        self.took_ms: dict[str, list[list[float]]] = {NOTHING: [], HAND: [], OURS: []}

    def nothing(self) -> float:
        return self._timed(NOTHING, lambda: None, lambda: None)

    def hand(self) -> float:
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        took_ms = self._timed(HAND, profile.start, profile.stop)
        del profile
        gc.collect()
        return took_ms

    def captured(self) -> float:
        step, stage = self._capture(next(_numbers)), span("train")

        def begin() -> None:
            step.__enter__()
            stage.__enter__()

        def end() -> None:
            stage.__exit__(None, None, None)
            step.__exit__(None, None, None)

        took_ms = self._timed(OURS, begin, end)
        assert step.result is not None
        assert step.result.wait(60)
        manifest = step.result.manifest()
        assert manifest is not None
        assert not manifest.problems()
        gc.collect()
        return took_ms

    def body(self) -> None:
        train(self.operators)

    def _capture(self, number: int) -> Capture:
        return capture(number)

    def _timed(self, side: str, begin: Callable[[], object], end: Callable[[], object]) -> float:
        times = [time.perf_counter()]
        for part in (begin, self.body, end):
            part()
            times.append(time.perf_counter())
        parts = [1000 * (after - before) for before, after in pairwise(times)]
        self.took_ms[side].append(parts)
        return sum(parts)


class ByHand:
    """A worker whose profiler is started and stopped with calls."""

    def start_profiler(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def stop_profiler(self) -> None:
        self.profile.stop()

    def drop(self) -> None:
        del self.profile
        gc.collect()


class Actor(ByHand, ActorWorker):
    pass


class Reference(ByHand, ReferenceWorker):
    pass


class ActorSteps(Steps):
    """Steps that train the demo's actors on Ray."""

    def __init__(self, sequences: int) -> None:
        super().__init__(0)
        remote: Any = ray.remote
        self.actors = [remote(Actor).remote(rank, 2, 0) for rank in range(2)]
        self.reference = remote(Reference).remote()
        self.workers = {"actor": self.actors, "ref": [self.reference]}
        port = ray.get(self.actors[0].serve.remote())
        ray.get([actor.join.remote(port) for actor in self.actors])
        tokens = torch.randint(len(VOCABULARY), (sequences, 40))
        ones = torch.ones(sequences, 39)
        self.batch = Batch(tokens, ones, torch.randn(sequences, 1), -ones, -ones)
        prepare(workers=self.workers)

    def hand(self) -> float:
        took_ms = self._timed(HAND, lambda: self._all("start_profiler"), lambda: self._all("stop_profiler"))
        self._all("drop")
        return took_ms

    def body(self) -> None:
        tokens = self.batch.tokens
        ray.get([self.reference.compute_ref_log_prob.remote(tokens)])
        ray.get([actor.compute_log_prob.remote(tokens[rank::2]) for rank, actor in enumerate(self.actors)])
        ray.get([actor.update_actor.remote(self.batch[rank::2]) for rank, actor in enumerate(self.actors)])

    def _capture(self, number: int) -> Capture:
        return capture(number, workers=self.workers)

    def _all(self, method: str) -> None:
        ray.get([getattr(worker, method).remote() for worker in (*self.actors, self.reference)])


def measure(where: str, steps: Steps, rounds: int) -> None:
    """Print the times of a step's parts, and the ratio of a captured step to the step by hand."""
    results = interleaved({NOTHING: steps.nothing, HAND: steps.hand, OURS: steps.captured}, rounds)
    rows = []
    for side, times in steps.took_ms.items():
        parts = [statistics.median(values) for values in zip(*times[1:], strict=True)]
        rows.append([side, *(f"{value:.1f}" for value in (*parts, statistics.median(results[side])))])
    table([f"{where}, ms", *PARTS, "all"], rows)
    ratio, low, high = ratio_interval(results[OURS], results[HAND])
    print(f"capture / by hand: {ratio:.3f}x ({low:.3f} to {high:.3f})")
    verdict(f"wall time of a captured step {where}, against by hand", ratio, 1.05, "x")


def record(folder: str, *roles: str) -> None:
    """Configure captures that record all ranks of these roles."""
    configure(
        save_path=Path(folder),
        steps="every:1",
        roles={role: {"ranks": "all"} for role in roles},
        torch={"activities": ["cpu"]},
        budget={"keep_steps": 2, "free_mb": 0},
    )


def main() -> None:
    quick = arguments(__doc__).quick
    header("a captured step", "stepscope", "torch", "ray")
    rounds = ROUNDS // 3 if quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        record(folder, "trainer")
        measure("in one process", Steps(OPERATORS // 10 if quick else OPERATORS), rounds)
        record(folder, "actor", "ref")
        start_ray()
        try:
            measure("in the demo's actors", ActorSteps(8 if quick else SEQUENCES), rounds)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
