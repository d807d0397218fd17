"""`stepscope watch`: the view of a run that goes on, against what the run itself knows."""

from __future__ import annotations

import os
from pathlib import Path
from socket import gethostname

import msgspec
import pytest

from packages.core.tests.test_why import hanging
from packages.report.tests.commands import Command
from packages.report.tests.steps import some
from stepscope import ProfileConfig, capture, span
from stepscope._recording.recorder import standing
from stepscope.files.layout import RunLayout
from stepscope.files.requests import Listening, write_listening
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import ProcessState
from stepscope.files.steps import StepLine
from stepscope_report.cli.asking import dead_owners
from stepscope_report.cli.watch import render
from stepscope_report.live import live

pytestmark = pytest.mark.usefixtures("one_recorder")

LOOP = """
async def agent(number):
    async with trajectory(f"t-{number}"), turn(1):
        async with span("search" if number % 2 else "generate", role="env" if number % 2 else "rollout"):
            await asyncio.Event().wait()

for step in range(5):
    with capture(step), span("update", role="actor"):
        time.sleep(0.02)

async def main():
    async with capture(5), span("rollout", role="trainer"):
        tasks = [asyncio.create_task(agent(number)) for number in range(120)]
        await asyncio.sleep(0.1)
        ready()
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.slow
def test_it_shows_the_step_that_runs_and_the_trajectories_in_it(tmp_path: Path, command: Command) -> None:
    with hanging(LOOP, tmp_path):
        view = command("watch", tmp_path, "--json").json
        text = command("watch", tmp_path, "--once").out
        page = tmp_path / "live.html"
        command("watch", tmp_path, "--once", "--html", page)
    assert (view["steps"], view["running"]) == (5, 5)
    assert min(view["durations_ns"]) >= 20_000_000
    assert view["flights"] == 120  # more than a state holds of those at one place
    assert {flight["trajectory"] for flight in view["oldest"]} <= {f"t-{number}" for number in range(120)}
    assert {lane["role"]: (lane["calls"], lane["stages"]) for lane in view["lanes"]} == {
        "env": (60, ["search"]),
        "rollout": (60, ["generate"]),
    }
    (stage,) = view["stages"]
    assert stage["stage"] == "actor/update"
    assert 0.02 <= stage["median_s"] <= view["median_ns"] / 1e9
    assert "Step 5 runs for" in text
    assert "120 trajectories under way" in text
    assert 'http-equiv="refresh"' in page.read_text()
    assert "120 trajectories under way" in page.read_text()
    assert not list((tmp_path / "recorder").iterdir())  # the questions and answers are removed


@pytest.mark.slow
def test_it_shows_the_first_step_of_a_run(tmp_path: Path, command: Command) -> None:
    with hanging("with capture(0), span('load'): ready(); time.sleep(60)", tmp_path):
        view = command("watch", tmp_path, "--json").json
        text = command("watch", tmp_path, "--once").out
    assert (view["steps"], view["running"], view["stages"]) == (0, 0, [])
    assert "load" in text


def test_a_run_that_has_ended_shows_its_steps(tmp_path: Path, command: Command) -> None:
    control = {"requests": False}  # this process goes on, so it must not listen
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), "control": control})
    for step in range(3):
        with capture(step, config=config), span("update", role="actor"):
            pass
    recorder = some(standing.standing())
    assert recorder.drain(20)
    standing.stop()
    text = " ".join(command("watch", tmp_path, "--once", "--every", "0.3").out.split())
    assert "No process answers" in text
    assert "3 steps" in text
    ended = Listening(host="a", pid=1, role="trainer", rank=None, since_ns=1, step=2, ended_ns=2)
    write_listening(RunLayout(tmp_path), ended)
    assert "No process answers" not in command("watch", tmp_path, "--once").out
    write_listening(RunLayout(tmp_path), msgspec.structs.replace(ended, role="actor", failed=True))
    assert "actor_a_pid1 " in command("watch", tmp_path, "--once").out


def test_a_run_without_lines_is_an_error(tmp_path: Path, command: Command) -> None:
    assert "record: off" in command("watch", tmp_path, "--once", code=3).err


def test_the_last_steps_tokens_are_shown_per_second(tmp_path: Path, command: Command) -> None:
    lines = (
        StepLine(step=step, start_ns=0, dur_ns=4_000_000_000, tokens={"train": 1000 * step, "rollout": 6})
        for step in range(4)
    )
    tmp_path.joinpath("steps_r.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    )
    assert "rollout 2, train 750" in command("watch", tmp_path, "--once", "--every", "0.3").out


def test_a_run_between_steps_is_not_a_run_without_answers(tmp_path: Path) -> None:
    worker = ProcessState(
        process=ProcessInfo(role="worker", rank=None, world_size=None, host="h", pid=1),
        run_id="r", at_ns=0, step=None, step_age_ns=None, spans=(), threads=(), tasks=(),
    )  # fmt: skip
    heads = [str(next(iter(render(RunLayout(tmp_path), live([], states))))) for states in ([worker], [])]
    assert ["No process answers" in head for head in heads] == [False, True]


def test_only_the_last_steps_count() -> None:
    lines = [StepLine(step=step, start_ns=0, dur_ns=100 if step < 50 else 7) for step in range(100)]
    view = live(lines, [])
    assert (view.steps, len(view.durations_ns), view.median_ns) == (100, 50, 7)


def test_the_step_that_runs_is_compared_with_its_kind() -> None:
    lines = [StepLine(step=step, start_ns=0, dur_ns=7 if step % 4 else 28) for step in range(40)]
    owner = ProcessState(
        process=ProcessInfo(role="trainer", rank=None, world_size=None, host="h", pid=1),
        run_id="r",
        at_ns=0,
        step=40,
        step_age_ns=5,
        spans=(),
        threads=(),
        tasks=(),
    )
    view = live(lines, [owner])
    assert (view.median_ns, view.compared, len(view.durations_ns)) == (28, 10, 40)


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_that_answers_from_another_container_has_not_died(tmp_path: Path, answers: bool) -> None:
    """No process of this container has its pid."""
    first, other = (
        Listening(host=gethostname(), pid=pid, role="trainer", rank=rank, since_ns=0, step=3, run_id="r")
        for rank, pid in enumerate((os.getpid(), 1 << 30))
    )
    for one in (first, other):
        write_listening(RunLayout(tmp_path), one)
    states = [
        ProcessState(process=one.process, run_id="r", at_ns=0, step=3, spans=(), threads=(), tasks=())
        for one in (first, *[other] * answers)
    ]
    dead = {} if answers else {other.process.key: "trainer 1"}
    assert dead_owners(RunLayout(tmp_path), states) == dead


def test_a_rank_that_a_smaller_attempt_left_out_has_not_died_in_it(tmp_path: Path) -> None:
    """The attempt before had a rank more, and ended a moment ago."""
    first, other = (
        Listening(
            host=gethostname(), pid=pid, role="trainer", rank=rank, since_ns=rank, step=3, run_id="r",
            world_size=2 if rank else 1,
        )
        for rank, pid in enumerate((os.getpid(), 1 << 30))
    )  # fmt: skip
    for one in (first, other):
        write_listening(RunLayout(tmp_path), one)
    state = ProcessState(process=first.process, run_id="r", at_ns=0, step=3, spans=(), threads=(), tasks=())
    assert dead_owners(RunLayout(tmp_path), [state]) == {}
