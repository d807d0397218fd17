"""Predictions of `stepscope what-if` beside the same step run with the change.

A round captures a step of 40 trajectories without a change, predicts each change from it, and runs the step
with each change. The work is that of `_async_step`. Medians over the rounds, which differ in their lengths.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence

from _async_step import Plan, Setting, Step, plans
from _measure import arguments, header, table, verdict

from stepscope import capture, configure
from stepscope.files.layout import RunLayout
from stepscope.report.whatif.changes import Options
from stepscope.report.whatif.prediction import Prediction, predict
from stepscope.timeline import load_step

TRAJECTORIES = 40
ROUNDS = 3
CASES = {
    "--replicas +1": (Options(replicas="+1"), Setting(replicas=3)),
    "--replicas +2": (Options(replicas="+2"), Setting(replicas=4)),
    "--replicas -1": (Options(replicas="-1"), Setting(replicas=1)),
    "--balance length": (Options(balance="length"), Setting(balance=True)),
    "--cut-tail p90": (Options(cut_tail="p90"), Setting(wait_for=0.9)),
    "--tool-pool x2": (Options(tool_pool="x2"), Setting(tool_pool=4)),
    "--tool-pool 1": (Options(tool_pool="1"), Setting(tool_pool=1)),
    "--staleness 1": (Options(staleness=1), Setting(staleness=True)),
    "--overlap reward": (Options(overlap="reward"), Setting(overlap_reward=True)),
    "--replicas +1 --balance length --tool-pool x2 --overlap reward": (
        Options(replicas="+1", balance="length", tool_pool="x2", overlap="reward"),
        Setting(replicas=3, balance=True, tool_pool=4, overlap_reward=True),
    ),
}


def main() -> None:
    rounds = 1 if arguments(__doc__).quick else ROUNDS
    header("Predictions of stepscope what-if", "stepscope")
    results: dict[str, list[tuple[Prediction, float]]] = {name: [] for name in CASES}
    unchanged = []
    with tempfile.TemporaryDirectory() as folder:
        configure(save_path=folder, steps=range(rounds), roles={"*": {"profiler": "off"}})
        for seed in range(rounds):
            planned = plans(TRAJECTORIES, seed)
            captured = RunLayout(folder).step(seed).root
            asyncio.run(capture_step(seed, planned))
            unchanged.append(predict(load_step(captured), Options()))
            for name, (options, setting) in CASES.items():
                predicted = predict(load_step(captured), options)
                results[name].append((predicted, asyncio.run(run_step(setting, planned))))
    show(results, unchanged)


async def capture_step(number: int, planned: Sequence[Plan]) -> None:
    """Run the step without a change, captured."""
    async with capture(number):
        await Step(Setting(), planned).run()


async def run_step(setting: Setting, planned: Sequence[Plan]) -> float:
    """Return the seconds of the step with a change."""
    step = Step(setting, planned)
    began = time.perf_counter()
    await step.run()
    return time.perf_counter() - began


def show(results: dict[str, list[tuple[Prediction, float]]], unchanged: Sequence[Prediction]) -> None:
    """Print predicted beside measured, and the verdicts."""
    off = [abs(one.replayed_ns / one.measured_ns - 1) for one in unchanged]
    print(f"without a change: {seconds(one.measured_ns / 1e9 for one in unchanged)}, ", end="")
    print(f"replayed {seconds(one.replayed_ns / 1e9 for one in unchanged)}\n")
    rows, errors, inside = [], {}, []
    for name, pairs in results.items():
        errors[name] = statistics.median(one.predicted_ns / 1e9 / took - 1 for one, took in pairs)
        within = [one.low_ns <= took * 1e9 <= one.high_ns for one, took in pairs]
        inside += within
        rows.append(
            (
                name,
                seconds(one.predicted_ns / 1e9 for one, _ in pairs),
                seconds(took for _, took in pairs),
                f"{100 * errors[name]:+.1f} %",
                f"{sum(within)} of {len(within)}",
            )
        )
    table(("change", "predicted", "measured", "error", "in the interval"), rows)
    verdict("the step without a change, replayed: off by at most", 100 * max(off), 3, " %")
    verdict("largest median error of a change", 100 * max(map(abs, errors.values())), 10, " %")
    close = sum(abs(error) <= 0.1 for error in errors.values())
    verdict("changes predicted within 10 %", close, 5, "", at_least=True)
    print(f"        in the interval: {sum(inside)} of {len(inside)}")


def seconds(values: Iterable[float]) -> str:
    """Return the median as text."""
    return f"{statistics.median(values):.2f} s"


if __name__ == "__main__":
    main()
