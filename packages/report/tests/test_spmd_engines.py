"""Engines of processes that a launcher started, each of which captures its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope_report import step_report
from stepscope_report.timeline import load_step, load_traces

MAIN = """
import asyncio, sys
import stepscope
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

class Held(FakeEngineProfiler):
    processes = int(sys.argv[2])

config = stepscope.ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"rollout": {"ranks": "all"}})
engine = FakeEngine(workers=1)

async def main():
    async with stepscope.capture(1, engines=[Held(engine)], config=config) as capture:
        await engine.generate(3)
    return capture

asyncio.run(main()).result.raise_for_missing(60)
"""


def captured(folder: Path, processes: int) -> Path:
    """Capture one step in each of two ranks; return its folder."""
    for rank in range(2):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "STEPSCOPE_RUN_ID": "0a0b0c0d"}
        command = [sys.executable, "-c", MAIN, str(folder), str(processes)]
        subprocess.run(command, env=environ, check=True, timeout=120)
    return folder / "step_000001"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "numbers"), [(1, [0, 1]), (2, [0])])
def test_an_engine_per_rank_is_a_replica_each_and_a_shared_one_is_one(
    processes: int, numbers: list[int], tmp_path: Path
) -> None:
    step = captured(tmp_path, processes)
    timeline = load_step(step)
    report = step_report(timeline, load_traces(step, timeline))
    assert [engine.number for engine in report.engines] == numbers
