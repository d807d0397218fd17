"""Files that come after the deadline of their engine's stop: pending until then, and found by readers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from packages.core.tests.runs import spans_alone
from stepscope import ProfileConfig, capture
from stepscope._recording.process import exports
from stepscope._recording.session import pipeline
from stepscope.engines import EngineCapture, patience_s
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Expectation, Manifest, ProcessPart
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.cli import run
from stepscope_report.timeline import load_step


class Slow(FakeEngineProfiler):
    """Writes its files when it is let go. Given up on, it writes them all the same, as vLLM's workers do."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.let_go = False
        self.is_over = False

    async def stop(self) -> list[Artifact]:
        return await asyncio.shield(self._in_the_end())

    async def write(self) -> None:
        self.let_go = True
        await until(lambda: self.is_over)

    async def _in_the_end(self) -> list[Artifact]:
        await until(lambda: self.let_go)
        artifacts = await super().stop()
        self.is_over = True
        return artifacts


async def until(happened: Callable[[], bool]) -> None:
    """Wait on any event loop until something has happened on another."""
    for _ in range(10_000):
        if happened():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(
        tmp_path, steps="0:10", roles={"rollout": {"ranks": "all"}}, budget={"fanout_seconds": 0.2}
    )


async def captured(config: ProfileConfig, step: int, profiler: FakeEngineProfiler) -> None:
    async with capture(step, config=config, engines=[profiler]):
        await profiler.engine.generate(2)
    await asyncio.to_thread(exports.exporter().drain, 60)  # until `manifest.json` is written


async def given_up(config: ProfileConfig) -> None:
    """Leave step 1, whose engine writes its files when step 2 is captured already."""
    profiler, other = Slow(FakeEngine()), FakeEngineProfiler(FakeEngine())
    await captured(config, 1, profiler)
    await captured(config, 2, other)
    await profiler.write()


def layout_of(config: ProfileConfig, step: int = 1) -> StepLayout:
    return RunLayout(config.save_path).step(step)


def on_disk(config: ProfileConfig, step: int = 1) -> Expectation:
    """Return what `manifest.json` says of the engine, without a look at any other file."""
    return replica_in(msgspec.json.decode(layout_of(config, step).manifest.read_bytes(), type=Manifest))


def read_back(config: ProfileConfig, step: int = 1) -> Expectation:
    """Return what a reader of the step's folder says of the engine."""
    manifest = load_step(layout_of(config, step).root).manifest
    assert manifest is not None
    return replica_in(manifest)


def replica_in(manifest: Manifest) -> Expectation:
    (outcome,) = [item for part in manifest.processes for item in part.expected if item.name == "replica 0"]
    return outcome


async def exit_codes(config: ProfileConfig) -> set[int]:
    """Return the exit codes of `ls`, `report` and `merge` for step 1."""
    folder = str(layout_of(config).root)
    commands = ["ls", folder], ["report", folder, "--no-html"], ["merge", folder]
    return {await asyncio.to_thread(run, command) for command in commands}


async def test_a_stop_past_its_deadline_is_pending_in_the_manifest_and_for_every_command(
    config: ProfileConfig, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Slow(FakeEngine())
    await captured(config, 1, profiler)
    for item in (on_disk(config), read_back(config)):
        assert (item.state, item.pending) == ("pending", "late")
        assert str(item.reason).startswith("timeout: stop ")
    assert " 0.2 s" in str(item.reason)
    assert "timeout: stop" in caplog.text  # the run's own log names the deadline
    assert await exit_codes(config) == {3}
    assert "replica 0: pending: timeout" in capsys.readouterr().out
    await profiler.write()


async def test_the_end_of_a_late_stop_enters_its_files_and_tells_the_hooks(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Path] = []
    monkeypatch.setattr(pipeline, "artifact_hooks", [lambda path, sidecar: told.append(path)])
    profiler = Slow(FakeEngine())
    await captured(config, 1, profiler)
    await profiler.write()
    await until(lambda: on_disk(config).state == "ok")
    assert len(on_disk(config).artifacts) == 2
    assert await exit_codes(config) == {0}
    assert pipeline._hooks.drain(20) == []
    of_this_run = [path for path in told if path.is_relative_to(config.save_path)]  # not of earlier tests
    assert len(of_this_run) == 2


async def test_a_stop_that_fails_after_its_deadline_has_failed(config: ProfileConfig) -> None:
    profiler = Slow(FakeEngine())
    await captured(config, 1, profiler)
    profiler.engine.dead = True
    profiler.let_go = True
    await until(lambda: on_disk(config).state == "failed")
    assert "after its deadline" in (read_back(config).reason or "")


async def test_why_an_engine_did_not_start_is_kept_though_its_stop_hangs_too(config: ProfileConfig) -> None:
    engine = FakeEngine()
    engine.fails_to_start = 0
    profiler = Slow(engine)
    await captured(config, 1, profiler)
    assert "worker 0 cannot start" in (on_disk(config).reason or "")
    await profiler.write()
    await asyncio.sleep(0.01)
    assert (read_back(config).state, read_back(config).pending) == ("failed", None)


async def test_readers_find_the_files_of_a_stop_that_the_next_capture_gave_up(config: ProfileConfig) -> None:
    await given_up(config)
    assert on_disk(config).state == "pending"  # no capture writes the manifest of an earlier one
    assert (read_back(config).state, len(read_back(config).artifacts)) == ("ok", 2)
    assert read_back(config, 2).state == "ok"
    assert await exit_codes(config) == {0}


async def test_readers_find_files_that_come_one_after_another(config: ProfileConfig, tmp_path: Path) -> None:
    await given_up(config)
    *_, last = sorted(layout_of(config).sidecars())
    last.rename(tmp_path / "not yet")
    assert len(read_back(config).artifacts) == 1
    (tmp_path / "not yet").rename(last)
    assert len(read_back(config).artifacts) == 2


async def test_files_of_another_run_or_replica_are_not_taken_for_the_late_ones(config: ProfileConfig) -> None:
    await given_up(config)
    for path, changed in zip(sorted(layout_of(config).sidecars()), ({"run_id": "other"}, {}), strict=True):
        sidecar = msgspec.json.decode(path.read_bytes(), type=Sidecar)
        artifact = sidecar.artifact if changed else msgspec.structs.replace(sidecar.artifact, replica=1)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(sidecar, artifact=artifact, **changed)))
    assert read_back(config).state == "pending"


async def test_files_that_a_dead_process_did_not_write_are_missing_until_they_come(
    config: ProfileConfig, tmp_path: Path
) -> None:
    await given_up(config)
    _make_its_process_one_that_is_gone(config)
    sidecars = layout_of(config).sidecars()
    for number, sidecar in enumerate(sidecars):
        sidecar.rename(tmp_path / str(number))
    item = read_back(config)
    assert (item.state, item.pending) == ("missing", None)
    assert "gone: timeout: " in str(item.reason)
    assert await exit_codes(config) == {3}
    for number, sidecar in enumerate(sidecars):
        (tmp_path / str(number)).rename(sidecar)
    assert read_back(config).state == "ok"
    assert await exit_codes(config) == {0}


class Patient(FakeEngineProfiler):
    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.waited_s: list[float] = []

    async def start(self, capture: EngineCapture) -> None:
        self.capture = capture
        self.waited_s.append(patience_s(capture))
        await super().start(capture)

    async def stop(self) -> list[Artifact]:
        self.waited_s.append(patience_s(self.capture))
        return await super().stop()


def test_an_engine_is_told_the_deadline_that_close_was_given(config: ProfileConfig) -> None:
    profiler = Patient(FakeEngine())
    cap = capture(1, config=config.replace(budget={"fanout_seconds": 20}), engines=[profiler])
    cap.open()
    cap.close(deadline_s=3)
    assert profiler.waited_s == [20, 3]


def _make_its_process_one_that_is_gone(config: ProfileConfig) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for path in layout_of(config).processes.glob("*.json"):
        part = msgspec.json.decode(path.read_bytes(), type=ProcessPart)
        process = msgspec.structs.replace(part.process, pid=gone.pid)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(part, process=process)))
