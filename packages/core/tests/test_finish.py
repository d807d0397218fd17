"""Hooks and `finish.command`: run once, after the files, beside the training; what goes wrong is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from packages.core.tests.runs import manifest_of, outcomes
from stepscope import ProfileConfig, capture, on_artifact, on_capture, span
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.process import exports, shutdown
from stepscope._recording.session import pipeline, programs
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.manifest import Expectation, awaited
from stepscope.files.sidecar import ProcessInfo, Sidecar
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def a_config(tmp_path: Path, **settings: object) -> ProfileConfig:
    return ProfileConfig.from_mapping(
        {
            "save_path": str(tmp_path / "run"),
            "steps": ["every:1"],
            "roles": {"trainer": {"ranks": "all", "profiler": "off"}},
            "torch": {"activities": ["cpu"]},
        }
        | settings
    )


def captured(config: ProfileConfig, step: int = 1, rank: int | None = None) -> CaptureResult:
    with capture(step, config=config, rank=rank) as block, span("update"):
        pass
    return block.result


def drain() -> None:
    assert not exports.exporter().drain(60)
    assert not pipeline._hooks.drain(60)
    assert not pipeline._commands.drain(60)


def log_of(result: CaptureResult) -> str:
    assert result.path is not None
    (log,) = result.path.glob("finish_*.log")
    assert log.stat().st_mode & 0o777 == 0o600
    return log.read_text()


# Hooks.


@pytest.mark.needs("torch")
def test_each_artifact_is_told_with_its_sidecar_and_the_capture_once_after_them(tmp_path: Path) -> None:
    import torch  # noqa: F401  # loaded, so that there is something to record

    drain()  # traces of other tests
    told: list[object] = []
    threads: set[str] = set()

    @on_artifact
    def artifact(path: Path, sidecar: Sidecar) -> None:
        threads.add(threading.current_thread().name)
        assert path.exists()
        assert msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar) == sidecar
        told.append(sidecar.artifact.kind)

    @on_capture
    def whole(result: CaptureResult) -> None:
        manifest = manifest_of(result)
        told.append(manifest.state)

    on_capture(whole)  # a second time is no second call
    captured(a_config(tmp_path, roles={"trainer": {"ranks": "all"}}))
    drain()
    assert told == ["torch_trace", "ok"]
    assert threads == {"stepscope-hooks"}


async def test_what_an_engine_wrote_is_told_too(tmp_path: Path) -> None:
    told: list[str] = []

    @on_artifact
    def artifact(path: Path, sidecar: Sidecar) -> None:
        assert str(path).endswith(sidecar.artifact.path)
        told.append(sidecar.artifact.path)

    config = a_config(tmp_path, roles={"rollout": {"ranks": "all"}})
    async with capture(1, config=config, engines=[FakeEngineProfiler(FakeEngine())]) as block:
        pass
    drain()
    item = outcomes(block.result)["replica 0"]
    assert sorted(told) == sorted(artifact.path for artifact in item.artifacts) != []


def test_a_hook_that_raises_is_logged_once_and_stands_in_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(result: CaptureResult) -> None:
        raise OSError("no bucket")

    on_capture(broken)
    config = a_config(tmp_path)
    results = [captured(config, step) for step in (1, 2)]
    drain()
    for result in results:
        assert any("on_capture hook" in line and "OSError: no bucket" in line for line in result.problems())
    assert caplog.text.count("no bucket") == 1


def test_a_hook_that_hangs_holds_up_neither_the_capture_nor_the_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang(result: CaptureResult) -> None:
        hanging.set()
        release.wait()

    on_capture(hang)
    config = a_config(tmp_path)
    first = captured(config, 1)
    assert hanging.wait(30)
    captured(config, 2).raise_for_missing()
    pipeline.end("the process exited", 0.01, patient=True)
    assert "the process exited" in caplog.text
    assert any("on_capture hook" in line for line in first.problems())
    release.set()
    drain()


def test_a_step_that_is_not_selected_is_told_to_nobody(tmp_path: Path) -> None:
    told: list[CaptureResult] = []
    on_capture(told.append)
    captured(a_config(tmp_path, steps=[7]), 1)
    drain()
    assert told == []


async def asynchronous(result: CaptureResult) -> None:
    """Nobody would await it."""


def hidden(fn: Callable[..., object]) -> Callable[..., object]:
    """Hide that the function is asynchronous, as decorators do."""

    def inner(*args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    return inner


class Asynchronous:
    """An object whose calls nobody would await."""

    async def __call__(self, result: CaptureResult) -> None: ...


@pytest.mark.parametrize("register", [on_artifact, on_capture])
@pytest.mark.parametrize(
    "hook", [asynchronous, hidden(asynchronous), partial(asynchronous), Asynchronous(), 7]
)
def test_what_nobody_could_call_is_refused(register: Callable[[object], object], hook: object) -> None:
    with pytest.raises(ConfigError, match="plain function"):
        register(hook)


# The command.

SHOW = f"{sys.executable} -c 'import os, json; print(json.dumps(dict(os.environ)))'"


def test_the_command_runs_once_a_capture_and_knows_what_was_captured(tmp_path: Path) -> None:
    config = a_config(tmp_path, finish={"command": SHOW})
    result = captured(config, 3, rank=0)
    drain()
    known = json.loads(log_of(result))
    layout = RunLayout(config.save_path)
    assert {
        name: known[f"STEPSCOPE_{name}"] for name in ("SAVE_PATH", "STEP", "STEP_PATH", "RANK", "PID")
    } == {
        "SAVE_PATH": str(layout.root),
        "STEP": "3",
        "STEP_PATH": str(layout.step(3).root),
        "RANK": "0",
        "PID": str(os.getpid()),
    }
    manifest = manifest_of(result)
    assert known["STEPSCOPE_RUN_ID"] == manifest.run_id
    assert outcomes(result)["finish command"] == Expectation(name="finish command", kind="after", state="ok")


def test_a_program_that_imports_stepscope_can_be_the_command(tmp_path: Path) -> None:
    program = "import stepscope.config as c; print(c.resolve().save_path)"
    config = a_config(tmp_path, finish={"command": f"{sys.executable} -c '{program}'"})
    result = captured(config)
    drain()
    assert log_of(result).strip() == config.save_path


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_figures_are_told_the_open_run_of_wandb(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(id="a1", offline=mode != "online", disabled=mode == "disabled")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    told = {} if mode == "online" else {"WANDB_MODE": mode}
    assert programs._wandb_run() == {"WANDB_RUN_ID": "a1", **told}


def test_a_run_of_wandb_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=object()))
    assert programs._wandb_run() == {}


def test_a_command_that_fails_is_recorded_with_its_exit_code_and_output(tmp_path: Path) -> None:
    result = captured(a_config(tmp_path, finish={"command": "echo no bucket >&2; exit 3"}))
    drain()
    item = outcomes(result)["finish command"]
    assert (item.state, item.reason) == ("failed", f"exit code 3; see {_log_name(result)}")
    assert log_of(result) == "no bucket\n"


def _log_name(result: CaptureResult) -> str:
    assert result.path is not None
    (log,) = result.path.glob("finish_*.log")
    return log.name


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    # The child holds the pipe open: reading to its end returns once the child is gone too.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = f"sleep 600 > {pipe} & wait"
    result = captured(a_config(tmp_path, finish={"command": command, "timeout_s": 0.3}))
    assert pipe.read_bytes() == b""
    drain()
    assert outcomes(result)["finish command"].state == "failed"


def test_a_command_under_way_does_not_count_as_missing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    result = captured(a_config(tmp_path, finish={"command": f"cat {go}"}))
    result.raise_for_missing()
    item = outcomes(result)["finish command"]
    assert item.state == "pending"
    go.write_text("done")
    drain()
    assert outcomes(result)["finish command"].state == "ok"


def test_a_step_is_not_removed_before_its_command_is_done(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    command = f'[ "$STEPSCOPE_STEP" != 1 ] || cat {go}'
    config = a_config(tmp_path, finish={"command": command}, budget={"keep_steps": 1})
    layout = RunLayout(config.save_path)
    captured(config, 1)
    assert not exports.exporter().drain(60)
    captured(config, 2)
    assert not exports.exporter().drain(60)
    assert set(layout.steps()) == {1, 2}
    go.write_text("done")
    drain()
    captured(config, 3)
    assert not exports.exporter().drain(60)
    assert set(layout.steps()) == {3}


def test_an_old_step_whose_command_failed_is_not_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = a_config(tmp_path, finish={"command": '[ "$STEPSCOPE_STEP" != 1 ]'}, budget={"keep_steps": 1})
    for step in (1, 2, 3):
        captured(config, step)
        drain()
    assert set(RunLayout(config.save_path).steps()) == {1, 3}
    assert caplog.text.count("budget.keep_steps") == 1


def test_of_ranks_that_capture_by_themselves_the_chosen_ones_run_it(tmp_path: Path) -> None:
    config = a_config(tmp_path, finish={"command": "true"})
    result = captured(config, rank=1)
    drain()
    item = outcomes(result)["finish command"]
    assert item.state == "skipped"
    assert str(item.reason).startswith("rank 1 ")


def test_the_command_waits_for_the_files_of_the_other_processes(tmp_path: Path) -> None:
    config = a_config(tmp_path, finish={"command": "true"})
    block = capture(1, config=config).open()
    assert block._life is not None
    session = block._life.session
    assert session is not None
    other = ProcessInfo(role="actor", rank=1, world_size=2, host="elsewhere", pid=1)
    late = msgspec.structs.replace(
        session.manifest_part.record,
        process=other,
        owner=False,
        expected=(awaited("torch trace", "trace", "exporting"),),
    )
    part = session.layout.part_of(other, session.run_id)
    part.write_bytes(msgspec.json.encode(late))
    block.close()
    assert not exports.exporter().drain(60)
    (job,) = pipeline._commands.drain(0)
    assert isinstance(job, programs.Chores)
    files = block.result._files
    assert files is not None
    assert files.unfinished()
    done = msgspec.structs.replace(
        late, expected=(Expectation(name="torch trace", kind="trace", state="ok"),)
    )
    part.write_bytes(msgspec.json.encode(done))
    drain()
    assert outcomes(block.result)["finish command"].state == "ok"


def test_a_capture_that_never_opened_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[CaptureResult] = []
    on_capture(told.append)

    def refuse() -> None:
        raise RuntimeError("no signals here")

    monkeypatch.setattr(shutdown, "install", refuse)
    block = capture(1, config=a_config(tmp_path, record="off", finish={"command": "true"}))
    with pytest.raises(RuntimeError, match="no signals here"):
        block.open()
    drain()
    assert told == []
    assert outcomes(block.result)["finish command"].state == "skipped"


# The end of the process.

PROGRAM = """
    import os, signal, sys, threading
    from stepscope import capture, on_capture

    on_capture(lambda result: print("told", result.step, flush=True))
    with capture(1):
        pass
"""


def run_program(tmp_path: Path, tail: str, **finish_settings: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}
    environ |= {"STEPSCOPE_STEPS": "1", "STEPSCOPE_SAVE_PATH": str(tmp_path / "run")}
    environ |= {f"STEPSCOPE_FINISH__{name.upper()}": value for name, value in finish_settings.items()}
    environ["STEPSCOPE_EXPORT__WHEN"] = "deferred"
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(tail)
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False, timeout=120
    )


def left_behind(tmp_path: Path) -> Expectation:
    layout = RunLayout(tmp_path / "run").step(1)
    (part,) = layout.processes.glob("*.json")
    items = json.loads(part.read_bytes())["expected"]
    return next(msgspec.convert(item, Expectation) for item in items if item["name"] == "finish command")


@pytest.mark.slow
def test_hooks_and_the_command_of_the_last_capture_run_at_exit(tmp_path: Path) -> None:
    ran = run_program(tmp_path, "", command="sleep 1; echo ran")
    assert (ran.returncode, ran.stdout) == (0, "told 1\n")
    assert left_behind(tmp_path).state == "ok"


def test_a_terminated_process_takes_its_command_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    tail = """
        from stepscope import flush
        from stepscope._recording.process import shutdown
        shutdown.SIGTERM_S = 0.5
        flush()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    """
    ran = run_program(tmp_path, tail, command="sleep 600")
    assert ran.returncode == -15
    assert "SIGTERM" in str(left_behind(tmp_path).reason)
    assert time.monotonic() - began < 60
