"""Limits: each ends or thins out a capture, says which it was, and leaves training alone."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from packages.core.tests import runs
from packages.core.tests.runs import step_of
from stepscope import ProfileConfig, capture, span
from stepscope._recording.process import exports
from stepscope._recording.process import identity as run_identity
from stepscope._recording.session import budget as control
from stepscope._recording.session import pipeline
from stepscope._recording.spans import slot
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import read_parts
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.timeline import load_step

Usage = namedtuple("Usage", "total used free")


def a_config(tmp_path: Path, **budget: object) -> ProfileConfig:
    return ProfileConfig.from_mapping(
        {
            "save_path": str(tmp_path / "run"),
            "steps": ["every:1"],
            "roles": {"trainer": {"ranks": "all"}, "rollout": {"ranks": "all"}},
            "torch": {"activities": ["cpu"]},
            "budget": budget,
        }
    )


def outcomes(config: ProfileConfig, step: int) -> dict[str, tuple[str, str | None]]:
    return {name: (item.state, item.reason) for name, item in runs.outcomes(step_of(config, step)).items()}


@pytest.mark.needs("torch")
def test_a_disk_that_is_nearly_full_gets_spans_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401  # loaded, so that there is something to record

    config = a_config(tmp_path, free_mb=1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 500 << 20))
    with capture(1, config=config), span("update"):
        pass
    state, reason = outcomes(config, 1)["torch trace"]
    assert state == "failed"
    assert re.match(rf"budget\.free_mb: 500 .*{re.escape(str(config.save_path))}, 1024 ", str(reason))
    assert outcomes(config, 1)["spans"][0] == "ok"


@pytest.mark.needs("torch")
def test_traces_of_earlier_steps_count_against_the_run(tmp_path: Path) -> None:
    import torch  # noqa: F401

    config = a_config(tmp_path, run_trace_mb=2)
    traces = RunLayout(config.save_path).step(0).traces / "actor"
    traces.mkdir(parents=True)
    (traces / "large.json").write_bytes(b"x" * (3 << 20))
    with capture(1, config=config):
        pass
    state, reason = outcomes(config, 1)["torch trace"]
    assert state == "failed"
    assert "run_trace_mb: 3 " in str(reason)


@pytest.mark.needs("torch")
def test_the_runs_folder_is_walked_once_for_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: F401

    config = a_config(tmp_path, run_trace_mb=100)
    before = RunLayout(config.save_path).step(0).traces
    before.mkdir(parents=True)
    walked: list[Path] = []
    sizes = control._sizes

    def noted(folder: Path) -> int:
        walked.append(folder)
        return sizes(folder)

    monkeypatch.setattr(control, "_sizes", noted)
    with capture(1, engines=[FakeEngineProfiler(FakeEngine())], config=config):
        pass
    assert walked.count(before) == 1


def test_on_a_disk_that_is_nearly_full_no_engine_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(tmp_path, free_mb=1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 500 << 20))
    engine = FakeEngine()
    with capture(1, engines=[FakeEngineProfiler(engine)], config=config):
        assert not engine.recordings
    state, reason = outcomes(config, 1)["replica 0"]
    assert state == "failed"
    assert str(reason).startswith("budget.free_mb: 500 ")


def grows_from(before_mb: int, *, to: int) -> Callable[[], int]:
    """Return a size that is `before_mb` where the capture is opened, and `to` for every watchdog thread."""
    return lambda: to if threading.current_thread().name == "stepscope-watchdog" else before_mb


def test_a_capture_that_outgrows_its_budget_is_truncated_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "POLL_S", 0.001)
    monkeypatch.setattr(control, "resident_mb", grows_from(100, to=900))
    config = a_config(tmp_path, memory_mb=500)
    with capture(1, config=config):
        until = threading.Event()
        while slot.session() is not None:  # the watchdog switches recording off
            until.wait(0.001)
        after = "training goes on"
    assert after
    assert re.search(r"by 800 MB\D*500", str(outcomes(config, 1)["spans"]))


def test_this_process_knows_its_size() -> None:
    size = control.resident_mb()
    assert size is None or 5 < size < 50_000


def test_the_newest_steps_are_kept_and_the_removed_ones_written_down(tmp_path: Path) -> None:
    config = a_config(tmp_path, keep_steps=2)
    for step in (3, 4, 5, 6):
        with capture(step, config=config):
            pass
    assert not exports.exporter().drain(60)
    run = RunLayout(config.save_path)
    assert list(run.steps()) == [5, 6]
    assert [line.split(":")[0] for line in run.removed.read_text().splitlines()] == ["step 3", "step 4"]


def test_a_step_goes_whole_while_a_thread_still_writes_into_it(tmp_path: Path) -> None:
    config = a_config(tmp_path, keep_steps=1)
    run = RunLayout(config.save_path)
    with capture(1, config=config):
        pass
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with suppress(FileNotFoundError):
                run.step(1).processes.joinpath(str(time.monotonic_ns())).touch()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with capture(2, config=config):
            pass
        assert not exports.exporter().drain(60)
    finally:
        stop.set()
        writer.join()
    assert [path.name for path in run.root.iterdir() if "step_" in path.name and path.is_dir()] == [
        "step_000002"
    ]


@pytest.mark.needs("torch")
def test_a_step_whose_trace_is_still_to_be_written_is_kept_for_now(tmp_path: Path) -> None:
    import torch  # noqa: F401

    budget = {"keep_steps": 1}
    config = a_config(tmp_path, **budget).replace(export={"when": "deferred"}, finish={"command": "true"})
    run = RunLayout(config.save_path)
    held = threading.Event()

    def hold() -> None:
        held.wait(60)

    try:
        with capture(1, config=config):
            exports.exporter().then(hold, deferred=False)
        assert pipeline.busy_steps(run) == {1}
    finally:
        held.set()
    exports.exporter().drain(60)
    with capture(2, config=config):
        pass
    exports.exporter().drain(60)
    assert 2 in run.steps()


@pytest.mark.needs("torch")
def test_a_resumed_run_removes_its_own_part_of_steps_that_an_earlier_run_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: F401

    config = a_config(tmp_path)
    run = RunLayout(config.save_path)
    files = dict[str, set[Path]]()
    for name, keep in (("before", None), ("resumed", 1)):
        monkeypatch.setitem(run_identity._ids, "run", name)
        for step in (3, 4):
            with capture(step, config=a_config(tmp_path, keep_steps=keep)) as block, span("update"):
                pass
            assert block.result.wait(60)
            if (name, step) == ("resumed", 3):
                (trace,) = {*run.step(3).root.rglob("*.json.gz")} - files["before"]
                trace.unlink()
                (trace / "of_ascend").mkdir(parents=True)  # its recordings are folders
        files[name] = {file for file in run.step(3).root.rglob("*") if file.is_file()}
    assert {part.run_id for part in read_parts(run.step(3))[0]} == {"before"}
    assert files["resumed"] == files["before"]  # with its trace and spans, and without the resumed run's
    assert {part.run_id for part in read_parts(run.step(4))[0]} == {"before", "resumed"}
    assert load_step(run.step(3).root).run_id == "before"
    assert run.removed.read_text().startswith("step 3")


def test_what_another_run_left_in_the_folder_is_not_removed(tmp_path: Path) -> None:
    config = a_config(tmp_path, keep_steps=1)
    foreign = RunLayout(config.save_path).step(1).root
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    for step in (3, 4):
        with capture(step, config=config) as block:
            pass
        assert block.result.wait(10)
    assert list(RunLayout(config.save_path).steps()) == [1, 4]
