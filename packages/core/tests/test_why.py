"""`stepscope why`: seeded hangs, of which it names the culprit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from stepscope import ProfileConfig, capture
from stepscope._recording.recorder import standing
from stepscope_report.cli import run

pytestmark = pytest.mark.slow

HEAD = """
import asyncio, os, queue, sys, threading, time
from stepscope import attach, capture, carrier, configure, profile_step, span, trajectory, turn
spans_alone = {"*": {"profiler": "off"}}
configure(save_path=sys.argv[1], record="spans", control={"poll_seconds": 0.1}, roles=spans_alone)

def ready():
    print("ready", flush=True)

"""

LOCK = """
lock = threading.Lock()

@profile_step("actor")
def update():
    with lock:
        pass

def hold():
    lock.acquire()
    threading.Event().wait()

threading.Thread(target=hold, name="holder", daemon=True).start()
while not lock.locked():
    time.sleep(0.01)
with capture(3), span("train", role="trainer"):
    ready()
    update()
"""

TOOL = """
async def search():
    async with span("search", role="env"):
        await asyncio.Event().wait()

async def agent(number):
    async with trajectory(f"t-{number}"), turn(0):
        if number == 2:
            await search()
        else:
            await asyncio.sleep(0.01)

async def main():
    async with capture(3), span("rollout", role="rollout"):
        tasks = [asyncio.create_task(agent(number)) for number in range(4)]
        await asyncio.sleep(0.2)
        ready()
        await asyncio.gather(*tasks)

asyncio.run(main())
"""

BLOCKED_LOOP = """
def score():
    threading.Event().wait()

async def reward():
    async with span("score", role="reward"):
        score()

async def other():
    async with span("generate", role="rollout"):
        await asyncio.sleep(0)
        await asyncio.sleep(0)

async def main():
    async with capture(3), span("step", role="trainer"):
        ready()
        await asyncio.gather(reward(), other())

asyncio.run(main())
"""

FULL_QUEUE = """
batches = queue.Queue(1)

@profile_step("rollout")
def push(batch):
    batches.put(batch)

with capture(3), span("rollout", role="trainer"):
    push(1)
    ready()
    push(2)
"""

RANK = """
import torch.distributed as dist, torch
store = f"file://{sys.argv[1]}/store"
dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)

def forward():
    time.sleep(100)

@profile_step("actor")
def update():
    if os.environ["RANK"] == "1":
        forward()
    dist.all_reduce(torch.ones(2))

with capture(3, role="actor"):
    ready()
    update()
"""


@contextmanager
def hanging(program: str, folder: Path, ranks: int = 1, head: str = HEAD) -> Iterator[None]:
    """Start a program in so many processes. The block runs once each has said that it hangs."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", head + program, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "STEPSCOPE_RUN_ID": "feed0002"} | ({"RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # until the call after that line is reached
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def answer_of(folder: Path, command: Command) -> dict[str, Any]:
    began = time.monotonic()
    answer: dict[str, Any] = command("why", folder, "--json").json
    took = time.monotonic() - began
    assert took < 4
    return answer


def culprit_of(answer: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = answer["calls"][answer["culprits"][0]]
    return first


@pytest.mark.parametrize(
    ("program", "role", "stage", "where"),
    [
        (LOCK, "actor", "update", "update at "),
        (TOOL, "env", "search", "search at "),
        (BLOCKED_LOOP, "reward", "score", "score at "),
        (FULL_QUEUE, "rollout", "push", "push at "),
    ],
    ids=["a lock", "a tool that never answers", "a blocked event loop", "a full queue"],
)
def test_a_seeded_hang_is_named(
    program: str,
    role: str,
    stage: str,
    where: str,
    tmp_path: Path,
    command: Command,
) -> None:
    with hanging(program, tmp_path):
        answer = answer_of(tmp_path, command)
        text = " ".join(command("why", tmp_path).out.split())
    first = culprit_of(answer)
    assert (first["role"], first["stage"]) == (role, stage)
    assert first["where"].startswith(where), first
    assert answer["step"] == 3
    assert f": trainer_{os.uname().nodename}" in text


def test_the_thread_that_holds_the_lock_is_listed(tmp_path: Path, command: Command) -> None:
    with hanging(LOCK, tmp_path):
        answer = answer_of(tmp_path, command)
    (thread,) = answer["beside"]
    assert thread.startswith("thread holder: hold at ")


def test_the_trajectory_of_a_tool_is_named(tmp_path: Path, command: Command) -> None:
    with hanging(TOOL, tmp_path):
        first = culprit_of(answer_of(tmp_path, command))
    assert (first["trajectory"], first["turn"]) == ("t-2", 0)


@pytest.mark.needs("torch")
def test_the_rank_that_misses_a_collective_is_named(tmp_path: Path, command: Command) -> None:
    with hanging(RANK, tmp_path, ranks=2):
        answer = answer_of(tmp_path, command)
    first = culprit_of(answer)
    assert "actor_rank1_" in first["process"]
    assert first["where"].startswith("forward at ")
    gathered = [call for call in answer["calls"] if call["collective"] is not None]
    assert [call["collective"] for call in gathered] == ["all_reduce"]
    assert "actor_rank0_" in gathered[0]["process"]


def test_nobody_answers_in_a_run_without_a_recorder(tmp_path: Path, command: Command) -> None:
    assert "record: spans" in command("why", tmp_path, "--wait", "0.2", code=3).err


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    assert run(["why", str(tmp_path / "no")]) == 2


def test_a_killed_run_shows_what_its_last_step_never_ended(tmp_path: Path, command: Command) -> None:
    with hanging(FULL_QUEUE, tmp_path, head=HEAD.replace('record="spans"', "steps=[3]")):
        time.sleep(1.5)  # an open span has its line on disk after a second
    text = " ".join(command("why", tmp_path, "--wait", "0.2", code=3).out.split())
    assert "Step 3, " in text
    assert "rollout push" in text


@pytest.mark.parametrize(
    ("record", "fix"), [("off", "record: spans, in the run's"), ("spans", "if it ended")]
)
def test_a_run_that_does_not_answer_is_told_what_it_lacks(
    tmp_path: Path, command: Command, record: str, fix: str
) -> None:
    settings = {
        "save_path": str(tmp_path),
        "steps": [1],
        "record": record,
        "roles": {"*": {"profiler": "off"}},
    }
    config = ProfileConfig.from_mapping(settings)
    with capture(1, config=config):
        pass
    standing.stop()
    assert fix in " ".join(command("why", tmp_path, "--wait", "0.1", code=3).err.split())
