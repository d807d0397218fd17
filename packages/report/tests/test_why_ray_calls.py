"""Calls of Ray actors that do not record: `stepscope why` knows them from Ray's state API."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import Frame, OpenSpan, ProcessState, RayCall, Thread
from stepscope_report.cli.why import ask
from stepscope_report.waiting import say_call
from stepscope_report.why import ENDED, Why, say_first, why

S = 10**9
DRIVER = """
import sys, time
import ray
from stepscope import capture, configure, span

ray.init("local", num_cpus=2, include_dashboard=True, configure_logging=False, log_to_driver=False,
         _temp_dir=sys.argv[2])
configure(save_path=sys.argv[1], record="spans", control={"poll_seconds": 0.1},
          roles={"*": {"profiler": "off"}})

@ray.remote(num_cpus=0.1)
class Reward:
    def score(self):
        time.sleep(600)

@ray.remote(num_cpus=0.1)
class Rollout:
    def generate(self, reward):
        return ray.get(reward.score.remote())

with capture(1, workers={}), span("rollout", role="trainer"):
    result = Rollout.remote().generate.remote(Reward.remote())
    print("ready", flush=True)
    ray.get(result)
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[RunLayout]:
    """Run a driver whose actors hang. Ray's folder is below /tmp, and short."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(tmp_path), folder],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_task_events_report_interval_ms": "200"},
    )
    try:
        assert program.stdout is not None
        assert "ready\n" in program.stdout
        yield RunLayout(tmp_path)
    finally:
        program.terminate()  # Ray's processes end with it
        program.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.needs("ray")
@pytest.mark.needs("opencensus")  # of ray[default], whose dashboard has the state API
def test_the_call_that_another_actor_waits_for_is_named(hanging: RunLayout) -> None:
    until = time.monotonic() + 60
    while len((answer := why(ask(hanging, 10))).calls) < 3:
        assert time.monotonic() < until
    (first,) = [answer.calls[index] for index in answer.culprits]
    assert (first.kind, first.role, first.stage) == ("actor", "Reward", "Reward.score")
    assert waits(answer) == {
        "rollout": {"Rollout.generate"},
        "Rollout.generate": {"Reward.score"},
        "Reward.score": set(),
    }


def waits(answer: Why) -> dict[str, set[str]]:
    """Return {stage: stages of the calls that it waits for}."""
    return {call.stage: {answer.calls[index].stage for index in call.waits_for} for call in answer.calls}


def driver(*calls: RayCall, file: str = "ray/_private/worker.py") -> ProcessState:
    """Return a driver with one call, in a file."""
    process = ProcessInfo(role="trainer", rank=None, world_size=None, host="a", pid=1)
    span = OpenSpan(span=1, role="trainer", stage="rollout", age_ns=99 * S, thread=7)
    frames = (Frame(f"site-packages/{file}", 3, "get"), Frame("loop.py", 2, "rollout"))
    return ProcessState(
        process=process, run_id="r", at_ns=0, step=1, spans=(span,), tasks=(), ray_calls=calls,
        threads=(Thread(id=7, name="MainThread", frames=frames),),
    )  # fmt: skip


def call_of(actor: str, method: str, state: str = "RUNNING", caller: str | None = None) -> RayCall:
    return RayCall(caller=caller, actor=actor, method=method, state=state, age_ns=9 * S, pid=4)


def test_a_call_that_waits_for_its_turn_is_left_out() -> None:
    queued = call_of("a1", "A.next", "SUBMITTED_TO_WORKER")
    answer = why([driver(call_of("a1", "A.run"), queued)])
    assert waits(answer) == {"rollout": {"A.run"}, "A.run": set()}
    assert re.search(r"a1: A\.run .* 9\.00 s, RUNNING \(pid 4\)$", say_call(answer.calls[answer.culprits[0]]))


def test_an_actor_that_never_started_is_named() -> None:
    answer = why([driver(call_of("a1", "A.run", "PENDING_NODE_ASSIGNMENT"))])
    assert answer.calls[answer.culprits[0]].where.startswith("PENDING_NODE_ASSIGNMENT")


def test_an_actor_that_records_is_known_by_its_own_calls() -> None:
    process = ProcessInfo(role="actor", rank=0, world_size=1, host="a", pid=4, actor_id="a1")
    span = OpenSpan(span=1, role="actor", stage="update", age_ns=9 * S, thread=8)
    actor = ProcessState(process=process, run_id="r", at_ns=0, step=1, spans=(span,), threads=(), tasks=())
    answer = why([driver(call_of("a1", "A.run")), actor])
    assert waits(answer) == {"rollout": {"update"}, "update": set()}


def test_a_driver_that_is_not_in_ray_waits_for_no_actor() -> None:
    answer = why([driver(call_of("a1", "A.run"), file="tools/search.py")])
    assert answer.calls[answer.culprits[0]].stage == "rollout"


def test_a_call_of_an_actor_to_itself_is_no_wait() -> None:
    answer = why(
        [driver(call_of("a1", "A.run"), call_of("a1", "A.more", "SUBMITTED_TO_WORKER", caller="a1"))]
    )
    assert [answer.calls[index].stage for index in answer.culprits] == ["A.run"]


def test_a_worker_that_died_comes_before_calls_that_wait_for_nothing_known() -> None:
    """The driver waits in a queue, which does not show who fills it."""
    waiting = msgspec.structs.replace(
        driver(file="asyncio/queues.py"), workers={"rollout_rank0_a_pid17": "rollout[0]"}
    )
    answer = why([waiting], {"rollout_rank0_a_pid17": f"{ENDED} (pid 17)"})
    assert say_first(answer) == "Died: rollout_rank0_a_pid17: its process has ended (pid 17)"
    assert [answer.calls[at].stage for at in answer.culprits] == ["", "rollout"]
    assert answer.fates == {"rollout[0]": "its process has ended (pid 17)"}
    assert "no other call" in say_first(why([waiting]))
