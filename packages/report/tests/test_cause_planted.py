"""Culprits that real processes and tasks plant by sleeping, and what the report's first line names."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import pytest

from packages.report.tests.commands import Command
from stepscope import ProfileConfig, capture, flush, span, trajectory
from stepscope_report.timeline import load_step

SPANS = {"*": {"profiler": "off"}}


def rank(root: str, number: int, slow: int, together: Barrier) -> None:
    os.environ.update(STEPSCOPE_RUN_ID="abcd1234", STEPSCOPE_RANK=str(number))
    config = ProfileConfig(save_path=root, steps=[0], roles=SPANS, counters={"hz": 0})
    rounds = []
    with capture(0, config=config, role="trainer"):
        together.wait()  # within the captures, because these take unequal times to open
        for _ in range(2):
            began_ns = time.monotonic_ns()
            with span("forward"):
                time.sleep(0.5 if number == slow else 0.1)
            rounds.append((began_ns, time.monotonic_ns()))
            with span("all_reduce"):
                together.wait()
    assert flush() == []
    Path(root).with_name(f"rank{number}.json").write_text(json.dumps(rounds))


def late_ns(rounds: Sequence[Sequence[Sequence[int]]], slow: int) -> float:
    """Return the time by which a rank came later than the others did and worked longer, by their own clocks.

    Args:
        rounds: The begin and the end of each rank's work in each round.
    """
    total_ns = 0.0
    for ranks in zip(*rounds, strict=True):
        (began_ns, ended_ns), others = ranks[slow], [*ranks[:slow], *ranks[slow + 1 :]]
        came_ns = median(end for _, end in others)
        worked_ns = median(end - begin for begin, end in others)
        total_ns += min(ended_ns - came_ns, ended_ns - began_ns - worked_ns)
    return total_ns


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_sleeps_before_a_barrier_is_named(tmp_path: Path, command: Command, ranks: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(ranks)
    started = [
        spawn.Process(target=rank, args=(str(tmp_path / "run"), number, 1, together))
        for number in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    (step,) = command("report", tmp_path / "run", "--json").json["steps"]
    cause = step["cause"]
    assert (cause["kind"], cause["process"]["rank"], cause["stage"]) == ("late-rank", 1, "forward")
    own = [json.loads((tmp_path / f"rank{number}.json").read_text()) for number in range(ranks)]
    # On a busy machine the ranks may leave a barrier so far apart that a round does not count.
    assert 0.4 < cause["longer_ns"] / late_ns(own, 1) < 1.15


def test_a_tool_that_sleeps_in_one_step_is_named_and_not_attributed_to_the_capture(
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
