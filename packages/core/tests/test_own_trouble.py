"""Trouble of our own, or of the disk, costs a recording and never the step: one fact each."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.core.tests.runs import manifest_of, spans_alone, until
from stepscope import ProfileConfig, capture, flush, span
from stepscope._recording.capture import on_demand
from stepscope._recording.fanout.messages import StartRequest
from stepscope._recording.fanout.worker_side import start_worker
from stepscope._recording.process import exports, manifest_part, private_loop
from stepscope._recording.session import budget
from stepscope._recording.spans import slot
from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.requests import read_requests
from stepscope.files.storage import remove_abandoned, temporary
from stepscope.files.values import attr_value


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path / "run")


def fail(error: BaseException) -> Callable[..., object]:
    def failing(*args: object, **kwargs: object) -> object:
        raise error

    return failing


# Opening.


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), RuntimeError("can't start new thread")])
@pytest.mark.usefixtures("in_production")
def test_a_capture_that_cannot_open_leaves_the_step_alone(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(budget, "Watchdog", fail(error))
    ran = []
    with capture(1, config=config) as cap:
        ran.append(slot.session())
    assert ran == [None]
    monkeypatch.undo()
    assert f"{type(error).__name__}" in str(cap.result.manifest())
    with capture(2, config=config) as cap:
        pass
    assert cap.result.problems() == []


@pytest.mark.usefixtures("in_production")
async def test_the_same_in_asynchronous_code(config: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "Watchdog", fail(OSError(116, "Stale file handle")))
    async with capture(1, config=config):
        assert slot.session() is None


def test_a_worker_that_cannot_open_is_ready_for_the_next_capture(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "Watchdog", fail(RuntimeError("can't start new thread")))
    request = StartRequest(capture_id="1", run_id="r", step=1, config=config, role="env")
    with pytest.raises(RuntimeError):
        start_worker(request)
    assert slot.session() is None


async def test_blocking_calls_of_the_users_do_not_hold_up_a_capture(config: ProfileConfig) -> None:
    release = threading.Event()
    tools = [asyncio.get_running_loop().run_in_executor(None, release.wait) for _ in range(40)]
    async with capture(1, config=config):
        assert not any(tool.done() for tool in tools)
    release.set()
    await asyncio.gather(*tools)


def test_work_that_is_interrupted_is_over_before_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []

    async def work() -> None:
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            happened.append("cancelled")

    with pytest.raises(KeyboardInterrupt):
        private_loop.run(work())
    assert happened == ["cancelled"]


# The disk.


def test_spans_whose_file_is_gone_are_failed(config: ProfileConfig) -> None:
    with capture(1, config=config) as cap:
        shutil.rmtree(RunLayout(config.save_path).step(1).spans)
    assert "spans: failed: " in str(cap.result.problems())


@pytest.mark.usefixtures("in_production")
def test_spans_without_a_file_are_counted_and_do_not_pile_up(config: ProfileConfig) -> None:
    folder = RunLayout(config.save_path).step(1).spans
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    with capture(1, config=config) as cap:
        for _ in range(10):
            with span("lost"):
                pass
    manifest = manifest_of(cap.result)
    (part,) = manifest.processes
    assert (part.spans, part.dropped) == (0, 10)
    assert "File exists" in str(cap.result.problems())


@pytest.mark.usefixtures("in_production")
def test_hooks_are_called_though_the_manifest_cannot_be_written(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.replace(finish={"command": "true"})
    monkeypatch.setattr(manifest_part, "write_manifest", fail(OSError(28, "No space left")))
    with capture(1, config=config) as cap:
        pass
    monkeypatch.undo()
    until(lambda: "has not run yet" not in str(cap.result.manifest()))


def test_what_a_killed_process_was_writing_is_removed_by_the_next_capture(config: ProfileConfig) -> None:
    folder = RunLayout(config.save_path).step(1).traces / "actor"
    folder.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from stepscope.files.storage import temporary\n"
    code += "p = temporary(Path(sys.argv[1])); p.mkdir(); (p / 'half').touch(); print(p, end='')"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder / "trace.json")], capture_output=True, text=True, check=True
    )
    living = temporary(folder / "mine")
    living.mkdir()
    foreign = folder / f".trace.json.00000000-1-{'0' * 12}"  # of another machine, on a disk that is shared
    foreign.touch()
    assert Path(made.stdout).is_dir()
    with capture(2, config=config):
        pass
    flush()
    exports.exporter().drain(30)
    assert sorted(folder.iterdir()) == sorted([living, foreign])
    assert remove_abandoned(folder) == []


# Requests.


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_what_lies_in_the_place_of_the_requests_holds_up_nobody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "control.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RecordError):
        read_requests(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("in_production")
def test_a_listener_that_failed_once_goes_on(config: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config.replace(steps=[], control={"poll_seconds": 0.01})
    layout = RunLayout(config.save_path)
    layout.root.mkdir(parents=True)
    failed = threading.Event()

    def full(*args: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch
    ):  # `in_production` stays: the listener may be about to note the failure
        patch.setattr(on_demand, "write_listening", full)
        capture(0, config=config)
        assert failed.wait(60)
    until(lambda: list(layout.listeners.glob("*.json")), 60)


# Values and names.


def test_a_tensor_on_a_device_is_named_and_not_read() -> None:
    class OnTheDevice:
        device = "cuda:0"
        ndim = 0

        def item(self) -> float:
            raise AssertionError("waited for the device")

    assert attr_value(OnTheDevice()) == "<OnTheDevice on cuda:0>"


def test_a_name_with_an_impossible_process_id_is_left_alone(tmp_path: Path) -> None:
    name = temporary(tmp_path / "a").name.replace(f"-{os.getpid()}-", f"-{'9' * 20}-")
    (tmp_path / name).write_text("x")
    assert remove_abandoned(tmp_path) == []
