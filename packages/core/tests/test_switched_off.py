"""STEPSCOPE_DISABLE=1, and the module that stands in for the package where it is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import manifest_of
from stepscope import ProfileConfig, capture
from tests.tree import ROOT

EVERYTHING = """
import asyncio, json, os, signal, sys, threading
import stepscope
from stepscope import *
from stepscope._recording.spans import slot

def fail(*_): raise AssertionError("called")
configure("no-such-file.yaml")
configure(steps=["every:1"], tool="torch", save_path="run", instrument=[{"preset": "areal"}], nonsense=1)
config = configure(
    steps=["every:1"], save_path="run",
    cuda_memory={"oom_any_step": "snapshot"}, finish={"command": "touch finished"},
    instrument=[{"module": "no_such_module", "name": "f", "role": "actor"}],
)
assert config.steps and config.save_path == "run"
before = json.dumps
instrument("json", "dumps", role="env")
assert json.dumps is before
prepare(workers=object(), engines=object())
asyncio.run(aprepare(workers=object(), engines=object()))
on_capture(fail), on_artifact(fail), on_report(fail)

@profile_step(role="actor")
def update(): return slot.active

for step in range(3):
    request_capture("next"), request_capture("next", save_path="elsewhere")
    with capture(step, workers=object(), engines=object()) as cap, span("reward", role="reward") as reward:
        reward.set(a=1)
        with trajectory("a"), turn(0), attach(carrier()):
            assert update() is None
        advance(), consume("a")
    assert not cap.result.captured and cap.result.path is None
    cap.result.raise_for_missing()
    assert flush() == []

async def loop():
    async with capture(3, engines=object()) as cap:
        assert update() is None
    cap = capture(4)
    await cap.aopen()
    await cap.aclose()
asyncio.run(loop())
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert not {"torch", "ray", "wrapt"} & set(sys.modules)
"""


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "STEPSCOPE_RAISE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_everything_is_off_and_nothing_is_written(tmp_path: Path) -> None:
    done = run(EVERYTHING, tmp_path, STEPSCOPE_DISABLE="1", STEPSCOPE_STEPS="every:1")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    # A mistake in the configuration is told and stops nothing.
    assert "no-such-file" in done.stderr
    assert "nonsense" in done.stderr


def test_a_configuration_that_the_environment_names_is_not_even_read(tmp_path: Path) -> None:
    code = "import stepscope\nwith stepscope.capture(2): pass"
    named = {"STEPSCOPE_CONFIG": "gone.yaml", "STEPSCOPE_STEPS": "2", "STEPSCOPE_NO_SUCH_FIELD": "1"}
    done = run(code, tmp_path, STEPSCOPE_DISABLE="1", **named)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_program_under_stepscope_run_is_not_patched(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, os; print(json.dumps.__module__, len(os.environ))")
    entry = json.dumps([{"module": "json", "name": "dumps", "step": "around"}])
    command = [sys.executable, "-m", "stepscope", "run", "--steps", "0", "train.py"]
    environment = {**os.environ, "STEPSCOPE_DISABLE": "1", "STEPSCOPE_INSTRUMENT": entry}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["json", str(len(environment))]
    assert "STEPSCOPE_DISABLE" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


DEMO = pytest.param(["demo", "out"], marks=[pytest.mark.needs("torch"), pytest.mark.needs("ray")])


@pytest.mark.parametrize("words", [["trigger", "."], DEMO])
def test_a_command_that_would_record_says_why_it_does_not(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepscope", *words]
    environment = {**os.environ, "STEPSCOPE_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "STEPSCOPE_DISABLE" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_worker_in_which_it_is_off_is_skipped(tmp_path: Path, remote: Callable[..., Any]) -> None:
    import ray

    class Worker:
        def update(self) -> int:
            return 1

    worker = remote(Worker, runtime_env={"env_vars": {"STEPSCOPE_DISABLE": "1"}})
    config = ProfileConfig(
        save_path=tmp_path, steps=[1], roles={"actor": {"ranks": "all"}}, torch={"activities": ["cpu"]}
    )
    with capture(1, config=config, workers={"actor": worker}) as cap:
        assert ray.get(worker.update.remote()) == 1
    cap.result.raise_for_missing()
    (absent,) = (absent for part in manifest_of(cap.result).processes for absent in part.absent)
    assert absent.state == "skipped"
    assert "STEPSCOPE_DISABLE" in str(absent.reason)


# Without the package.

LOOP = """
import asyncio, json, pickle
from profiling import attach, capture, carrier, configure, prepare, profile_step, span, trajectory, turn

configure(steps=[1], save_path="run", roles={"*": {"profiler": False}})
prepare()

class Worker:
    @profile_step(role="actor")
    def update(self, batch):
        with span("loss") as loss:
            loss.set(rows=len(batch))
        return sum(batch)

    @profile_step(role="actor")
    @classmethod
    def create(cls): return cls()

    @profile_step(role="rollout", stage="generate", attrs=lambda self, n: {"n": n})
    async def generate(self, n):
        await asyncio.sleep(0)
        return [n, n + 1]

    @profile_step(role="rollout")
    def stream(self, n):
        yield from range(n)

async def rollout(worker, step):
    carried = json.loads(json.dumps(carrier()))
    with trajectory(f"{step}-0", step=step):
        with turn(0), attach(carried):
            return await worker.generate(step)

async def train():
    worker, losses = pickle.loads(pickle.dumps(Worker.create())), []
    for step in range(3):
        async with capture(step) as cap:
            batch = await rollout(worker, step)
            losses.append(worker.update(batch) + sum(worker.stream(3)))
        cap.result.raise_for_missing()
    return losses

losses = asyncio.run(train())
for step in range(3, 5):
    with capture(step) as cap:
        losses.append(Worker().update([step]))
    opened = capture(step).open()
    opened.close()
try:
    with capture(9), span("failing"):
        raise ValueError("theirs")
except ValueError:
    losses.append(-1)
print(losses, bool(cap.result.captured))
"""


def stand_in() -> str:
    page = (ROOT / "docs" / "recording.md").read_text()
    (code,) = re.findall(r"```python\n(# profiling\.py\n.*?)```", page, re.DOTALL)
    return str(code)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_a_loop_on_the_stand_in_of_the_page_runs_with_the_package_and_without(
    installed: bool, tmp_path: Path
) -> None:
    (tmp_path / "profiling.py").write_text(stand_in())
    hidden = "" if installed else "import sys; sys.modules['stepscope'] = None\n"
    done = run(hidden + LOOP, tmp_path)
    assert done.stdout == "[4, 6, 8, 3, 4, -1] False\n", done.stderr
    assert (tmp_path / "run").exists() == installed


def test_the_stand_in_is_short() -> None:
    assert len([line for line in stand_in().splitlines() if line.strip()]) <= 22
