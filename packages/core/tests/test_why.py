"""`stepscope why`: seeded hangs, of which it names the culprit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.core.tests.runs import spans_alone, until
from packages.report.tests.commands import Command
from stepscope import capture
from stepscope._recording.recorder import standing
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run
from stepscope_report.why import Why, say_first

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

EVENTS = """
async def producer(mine, other):
    with span("produce", role="rollout"):
        await other.wait()
        mine.set()

async def consumer(mine, other):
    with span("consume", role="trainer"):
        ready()
        await other.wait()
        mine.set()

async def main():
    first, second = asyncio.Event(), asyncio.Event()
    async with capture(3):
        await asyncio.gather(producer(first, second), consumer(second, first))

asyncio.run(main())
"""

TRAJECTORIES = """
async def agent(number):
    with trajectory(f"t{number}"), turn(0), span("generate", role="rollout"):
        await asyncio.sleep(10_000)

async def turns():
    watch = next(t for t in threading.enumerate() if t.name == "stepscope-recorder-watch")
    clock = time.pthread_getcpuclockid(watch.ident)
    with open(f"{sys.argv[1]}/turns", "w", buffering=1) as file:
        last = time.clock_gettime(clock)
        while True:
            await asyncio.sleep(0.001)
            now = time.clock_gettime(clock)
            if now - last > 0.0005:
                print(now - last, file=file)
            last = now

async def main():
    async with capture(3):
        tasks = [asyncio.create_task(agent(number)) for number in range(20_000)]
        await asyncio.sleep(0.5)
        tasks.append(asyncio.create_task(turns()))
        ready()
        await asyncio.gather(*tasks)

asyncio.run(main())
"""

HANG_S = {"hang": 1, "signal": 600}


@contextmanager
def hanging(
    program: str, folder: Path, head: str = HEAD, ending: signal.Signals = signal.SIGKILL
) -> Iterator[None]:
    """Start a program. The block runs once it has said that it hangs."""
    command = [sys.executable, "-c", head + program, str(folder)]
    environment = {**os.environ, "STEPSCOPE_RUN_ID": "feed0002"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)  # until the call after that line is reached
            yield
        finally:
            process.send_signal(ending)


def answer_of(folder: Path, command: Command) -> dict[str, Any]:
    began = time.monotonic()
    answer: dict[str, Any] = command("why", folder, "--json").json
    took = time.monotonic() - began
    assert took < 4
    return answer


def culprit_of(answer: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = answer["calls"][answer["culprits"][0]]
    return first


def test_the_thread_that_holds_the_lock_is_listed(tmp_path: Path, command: Command) -> None:
    with hanging(LOCK, tmp_path):
        answer = answer_of(tmp_path, command)
    (thread,) = answer["beside"]
    assert "holder: hold at " in thread


def test_a_place_is_of_the_task_itself(tmp_path: Path, command: Command) -> None:
    """Before Python 3.12 no method of a task tells its context."""
    with hanging(EVENTS, tmp_path):
        answer = answer_of(tmp_path, command)
    places = {call["stage"]: call["where"].partition(" at ")[0] for call in answer["calls"]}
    assert places == {"produce": "producer", "consume": "consumer"}


def test_20_000_trajectories_are_told_in_time_and_leave_the_loop_alone(
    tmp_path: Path, command: Command
) -> None:
    """The time is CPU time, so that other work on the machine does not count: of the command, and of what
    looks at the loop's tasks between two turns of the loop.
    """
    with hanging(TRAJECTORIES, tmp_path):
        began = time.process_time()
        answer = command("why", tmp_path, "--wait", "20", "--json").json
        took_s = time.process_time() - began
    (first, *_) = [answer["calls"][index] for index in answer["culprits"]]
    assert (first["stage"], first["alike"]) == ("generate", 20_000 - 50)
    assert len(answer["calls"]) == 50
    assert took_s < 1
    turns = [float(line) for line in (tmp_path / "turns").read_text().split()]
    assert sum(turns) < 1  # of the look as a whole
    assert max(turns) < 0.02


@pytest.mark.parametrize("ending", ["hang", "signal"])
def test_a_run_that_ended_names_the_call_that_held_it(tmp_path: Path, command: Command, ending: str) -> None:
    head = HEAD.replace(
        'record="spans"', f'record="spans", steps=[], recorder={{"hang_seconds": {HANG_S[ending]}}}'
    )
    with hanging(FULL_QUEUE, tmp_path, head=head, ending=signal.SIGTERM):
        if ending == "hang":
            until((tmp_path / "step_000003" / "manifest.json").exists, 60)
    answer = command("why", tmp_path, "--wait", "0.2", "--json", code=3).json
    first = culprit_of(answer)
    assert (first["stage"], first["where"].partition(" at ")[0]) == ("push", "push")
    said = say_first(msgspec.convert(answer, Why))
    assert "no other call" in said
    for words in (("report", tmp_path), ("report", tmp_path, "--brief"), ("ls", tmp_path)):
        assert "".join(said.split()) in "".join(command(*words, code=3).out.split()), words


def test_nobody_answers_in_a_run_without_a_recorder(tmp_path: Path, command: Command) -> None:
    assert "record: off" in command("why", tmp_path, "--wait", "0.2", code=3).err


def test_a_run_without_run_json_is_known_by_its_lines_of_steps(tmp_path: Path, command: Command) -> None:
    (tmp_path / "steps_feed0002.jsonl").write_text('{"step":1,"start_ns":1,"dur_ns":1}\n')
    assert "if the run ended" in " ".join(command("why", tmp_path, "--wait", "0.1", code=3).err.split())


def test_a_run_that_an_exception_ended_names_the_step(tmp_path: Path, command: Command) -> None:
    folder = StepFolder(tmp_path, step=7)
    owner = folder.process("trainer", owner=True)
    owner.error = "ActorDiedError: The actor died unexpectedly."
    owner.close(10**7)
    folder.write()
    said = " ".join(command("why", tmp_path, "--wait", "0.1", code=3).err.split())
    assert "ActorDiedError" in said
    assert said.endswith("--step 7")


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    assert run(["why", str(tmp_path / "no")]) == 2


def test_a_killed_run_shows_what_its_last_step_never_ended(tmp_path: Path, command: Command) -> None:
    with hanging(FULL_QUEUE, tmp_path, head=HEAD.replace('record="spans"', "steps=[3]")):
        time.sleep(1.5)  # an open span has its line on disk after a second
    text = " ".join(command("why", tmp_path, "--wait", "0.2", code=3).out.split())
    assert "Step 3, " in text
    assert "rollout push" in text


@pytest.mark.parametrize(
    ("record", "fix"), [("off", "record: off, in the run's"), ("spans", "if the run ended")]
)
def test_a_run_that_does_not_answer_is_told_what_it_lacks(
    tmp_path: Path, command: Command, record: str, fix: str
) -> None:
    with capture(1, config=spans_alone(tmp_path, steps=[1], record=record)):
        pass
    recorder = standing.standing()
    assert recorder is None or recorder.drain(20)  # its thread writes run.json
    standing.stop()
    assert fix in " ".join(command("why", tmp_path, "--wait", "0.1", code=3).err.split())
