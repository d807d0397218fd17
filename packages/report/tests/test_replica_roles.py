"""Replicas of several roles that have the same number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.steps import MS, close
from stepscope.testing.steps import StepFolder
from stepscope_report.advice import Advice
from stepscope_report.model import StepReport
from stepscope_report.report import step_report
from stepscope_report.sections.breakdown import step_breakdown
from stepscope_report.sections.engines import engine_usage
from stepscope_report.timeline import EngineStall, Timeline, load_step, load_traces


def with_a_teacher(root: Path, *, processes: bool) -> Timeline:
    """Return a step of a student that writes 30 tokens in 600 ms, and a teacher that reads 400 in 200 ms.

    Both are replica 0 of their role.

    Args:
        processes: True if each is a process of its own; else the driver runs both, and its spans name them.
    """
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    student = folder.process("rollout", 0, replica=0) if processes else driver
    teacher = folder.process("teacher", 0, replica=0) if processes else driver
    call = driver.span("generate", 0, 600 * MS, role="rollout", trajectory="t", attrs={"replica": 0})
    scoring = driver.span("teacher_log_prob", 600 * MS, 800 * MS, role="teacher", attrs={"replica": 0})
    for process, above, stage, start, end, tokens in (
        (student, call, "prefill", 0, 100, 8), (student, call, "decode", 100, 600, 30),
        (teacher, scoring, "prefill", 600, 800, 400),
    ):  # fmt: skip
        process.span(
            stage, start * MS, end * MS, role="rollout", attrs={"tokens": tokens},
            **({"link": driver.link(above)} if processes else {"parent": above}),
        )  # fmt: skip
    close(folder, 800 * MS)
    return load_step(folder.write())


@pytest.mark.parametrize("processes", [True, False])
def test_replicas_of_two_roles_with_one_number_are_two(tmp_path: Path, processes: bool) -> None:
    timeline = with_a_teacher(tmp_path, processes=processes)
    engines = {engine.replica: engine for engine in engine_usage(timeline, ())}
    facts = {
        name: (engine.prompt_tokens, engine.output_tokens, engine.prefill_ns // MS, engine.decode_ns // MS)
        for name, engine in engines.items()
    }
    assert facts == {"replica 0": (8, 30, 100, 500), "teacher replica 0": (400, None, 200, 0)}


def test_one_replica_may_have_callers_of_several_roles(folder: StepFolder) -> None:
    """The process' role is no name for the replicas, and the driver and the agent loops call them."""
    driver = folder.process("trainer", owner=True)
    engine = folder.process("actor_rollout", 0, replica=0)
    for at, role in enumerate(("agent_loop", "trainer", "rollout")):
        above = driver.span("generate", at * MS, (at + 1) * MS, role=role, attrs={"replica": 0})
        engine.span("decode", at * MS, (at + 1) * MS, role="rollout", link=driver.link(above))
    close(folder, 3 * MS)
    (row,) = engine_usage(load_step(folder.write()), ())
    assert (row.replica, row.requests) == ("replica 0", 3)


def with_two_actors(root: Path, *, second: str, starts_ms: int = 0, replica: int = 0) -> StepReport:
    """Return the report of a step in which two processes of one role serve, the first one trajectory `a`."""
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    for rank, number, trajectory, start in ((0, 0, "a", 0), (1, replica, second, starts_ms)):
        actor = folder.process("rollout", rank)
        actor.span(
            "decode", start * MS, (start + 100) * MS, role="rollout", trajectory=trajectory,
            attrs={"replica": number, "tokens": 30},
        )  # fmt: skip
        actor.close(300 * MS)
    driver.close(300 * MS)
    return step_report(load_step(folder.write()))


def shared_number(report: StepReport) -> list[Advice]:
    return [advice for advice in report.advice if advice.rule == "shared-number"]


def test_two_processes_that_share_a_number_are_named(tmp_path: Path) -> None:
    (advice,) = shared_number(with_two_actors(tmp_path, second="b"))
    assert advice.what.startswith("2 processes ")
    assert advice.what.endswith(": replica 0")
    assert advice.because[0].endswith(": rollout 0, rollout 1")


@pytest.mark.parametrize(
    "case",
    [
        {"second": "b", "replica": 1},
        {"second": "a"},  # ranks of one engine, which serve the same requests
        {"second": "b", "starts_ms": 150},  # an engine that was started again
    ],
    ids=["numbers", "ranks", "restart"],
)
def test_processes_that_may_be_one_replica_are_not_named(tmp_path: Path, case: dict[str, Any]) -> None:
    assert shared_number(with_two_actors(tmp_path, **case)) == []


def test_a_stall_of_the_student_is_none_of_the_teacher(tmp_path: Path) -> None:
    timeline = with_a_teacher(tmp_path, processes=False)
    start_ns = timeline.window.start_ns
    stalled = msgspec.structs.replace(
        timeline, replicas=1, stalls=(EngineStall(replica=0, start_ns=start_ns, end_ns=start_ns + 800 * MS),)
    )
    assert step_breakdown(stalled).stalled_ns == 600 * MS


# Engines of processes that a launcher started, each of which captures its own.


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
