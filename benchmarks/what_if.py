"""Predictions of `stepscope what-if`, compared with runs of the same step with the change.

A round captures a step of 40 trajectories without a change (`_async_step`), predicts each change from it, and
runs the step with each change. The figures are medians over the rounds. Trajectories differ between rounds.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence

from _async_step import Plan, Setting, Step, plans
from _measure import arguments, header
from _predicted import show

from stepscope import capture, configure
from stepscope.files.layout import RunLayout
from stepscope_report.timeline import load_step
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Prediction, predict

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
    """Capture the step without a change."""
    async with capture(number):
        await Step(Setting(), planned).run()


async def run_step(setting: Setting, planned: Sequence[Plan]) -> float:
    """Run the step with a change, and return its seconds."""
    step = Step(setting, planned)
    began = time.perf_counter()
    await step.run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
