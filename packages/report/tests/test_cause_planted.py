"""Culprits that real processes and tasks plant by sleeping, and what the report's first line names."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope import ProfileConfig, capture, flush, span, trajectory
from stepscope_report.timeline import load_step

SPANS = {"*": {"profiler": "off"}}


def rank(root: str, number: int, slow: int, together: Barrier) -> None:
    os.environ.update(STEPSCOPE_RUN_ID="abcd1234", STEPSCOPE_RANK=str(number))
    config = ProfileConfig(save_path=root, steps=[0], roles=SPANS, counters={"hz": 0})
    together.wait()
    with capture(0, config=config, role="trainer"):
        for _ in range(2):
            with span("forward"):
                time.sleep(0.5 if number == slow else 0.1)
            with span("all_reduce"):
                together.wait()
    assert flush() == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_sleeps_before_a_barrier_is_named(tmp_path: Path, command: Command, ranks: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(ranks)
    started = [
        spawn.Process(target=rank, args=(str(tmp_path), number, 1, together)) for number in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    (step,) = command("report", tmp_path, "--json").json["steps"]
    cause = step["cause"]
    assert (cause["kind"], cause["process"]["rank"], cause["stage"]) == ("late-rank", 1, "forward")
    assert cause["longer_ns"] == pytest.approx(0.8e9, rel=0.15)


def test_a_tool_that_sleeps_in_one_step_is_named_and_not_billed_to_the_capture(
    tmp_path: Path, command: Command
) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[4, 5], roles=SPANS, counters={"hz": 0})

    slept_ns: dict[int, list[int]] = {step: [] for step in range(7)}

    async def play(step: int, number: int) -> None:
        with trajectory(f"{step}-{number}"):
            with span("generate", role="rollout"):
                await asyncio.sleep(0.02)
            with span("tool", role="env", attrs={"name": "search"}):
                began_ns = time.perf_counter_ns()
                await asyncio.sleep(0.4 if step == 5 else 0.01)
                slept_ns[step].append(time.perf_counter_ns() - began_ns)

    async def loop() -> None:
        for step in range(7):
            async with capture(step, config=config):
                await asyncio.gather(*(play(step, number) for number in range(3)))

    asyncio.run(loop())
    assert flush() == []
    step = command("report", tmp_path, "--step", "5", "--json").json["steps"][0]
    cause = step["cause"]
    assert (cause["kind"], cause["stage"]) == ("slow-tool", "search")
    assert cause["ns"] == pytest.approx(max(slept_ns[5]) - max(slept_ns[4]), rel=0.15)
    assert cause["usual_ns"] < 0.05e9 < 0.4e9 <= cause["took_ns"]
    assert step["unexplained_ns"] < 0.1e9
    assert step["baseline"]["cost_ns"] < 0.3e9
    assert load_step(tmp_path / "step_000005").window.wall_ns > 0.4e9
