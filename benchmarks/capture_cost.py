"""Wall time of a captured step, beside the same step between start() and stop() of torch.profiler by hand.

A step is many small torch operators in one process. What a capture writes is written afterwards, and waited
for before the next step, as is the trace that is dropped by hand. All take turns, in one process.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from _measure import arguments, header, interleaved, ratio_interval, table, verdict

from stepscope import capture, configure, span

OPERATORS = 5000
ROUNDS = 21
PARTS = ("open", "body", "close")
NOTHING, HAND, OURS = "no profiler", "torch.profiler by hand", "capture"


def train(operators: int) -> None:
    value = torch.ones(16)
    for _ in range(operators):
        value = value * 0.5 + 1


class Steps:
    """Steps of one kind, whose parts are timed."""

    def __init__(self, operators: int) -> None:
        self.operators = operators
        self.number = 0
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
        self.number += 1
        step = capture(self.number)
        stage = span("train")

        def begin() -> None:
            step.__enter__()
            stage.__enter__()

        def end() -> None:
            stage.__exit__(None, None, None)
            step.__exit__(None, None, None)

        took_ms = self._timed(OURS, begin, end)
        assert step.result is not None
        assert step.result.wait(60)
        gc.collect()
        return took_ms

    def _timed(self, side: str, begin: Callable[[], object], end: Callable[[], object]) -> float:
        times = [time.perf_counter()]
        for part in (begin, lambda: train(self.operators), end):
            part()
            times.append(time.perf_counter())
        parts = [1000 * (after - before) for before, after in pairwise(times)]
        self.took_ms[side].append(parts)
        return sum(parts)


def main() -> None:
    quick = arguments(__doc__).quick
    header("a captured step", "stepscope", "torch")
    with tempfile.TemporaryDirectory() as folder:
        configure(
            save_path=Path(folder),
            steps="every:1",
            roles={"*": {"ranks": "all"}},
            torch={"activities": ["cpu"]},
            budget={"keep_steps": 2, "free_mb": 0},
        )
        steps = Steps(OPERATORS // 10 if quick else OPERATORS)
        sides = {NOTHING: steps.nothing, HAND: steps.hand, OURS: steps.captured}
        results = interleaved(sides, ROUNDS // 3 if quick else ROUNDS)
    rows = []
    for side, times in steps.took_ms.items():
        parts = [statistics.median(values) for values in zip(*times[1:], strict=True)]
        total = statistics.median(results[side])
        rows.append([side, *(f"{value:.1f}" for value in parts), f"{total:.1f}"])
    table(["ms", *PARTS, "all"], rows)
    ratio, low, high = ratio_interval(results[OURS], results[HAND])
    print(f"capture / by hand: {ratio:.3f}x ({low:.3f} to {high:.3f})")
    verdict("wall time of a captured step, against by hand", ratio, 1.05, "x")


if __name__ == "__main__":
    main()
