"""Files that come after the deadline of their engine's stop: listed till then, in the manifest at last."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope._recording.after import pipeline
from stepscope.engines import EngineCapture, patience_s
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.late import Waiting, take_in, waiting
from stepscope.files.manifest.parts import part_files
from stepscope.files.manifest.records import Expectation, Manifest
from stepscope.files.sidecar import Artifact
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.cli import run


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
    return ProfileConfig(
        save_path=tmp_path,
        steps="0:10",
        roles={"rollout": {"ranks": "all"}},
        budget={"fanout_seconds": 0.2},
    )


async def captured(config: ProfileConfig, step: int, profiler: FakeEngineProfiler) -> None:
    async with capture(step, config=config, engines=[profiler]):
        await profiler.engine.generate(2)


async def given_up(config: ProfileConfig) -> FakeEngineProfiler:
    """Step 1, whose engine writes when step 2 is captured already: with the profiler of step 2."""
    profiler, other = Slow(FakeEngine()), FakeEngineProfiler(FakeEngine())
    await captured(config, 1, profiler)
    await captured(config, 2, other)
    assert item(config, 1).state == "failed"
    await profiler.write()
    return other


def item(config: ProfileConfig, step: int) -> Expectation:
    layout = RunLayout(config.save_path).step(step)
    manifest = msgspec.json.decode(layout.manifest.read_bytes(), type=Manifest)
    (outcome,) = [
        outcome for part in manifest.processes for outcome in part.expected if outcome.name == "replica 0"
    ]
    return outcome


def still_waiting(config: ProfileConfig, step: int = 1) -> list[Waiting]:
    return waiting(RunLayout(config.save_path).step(step))


async def test_a_stop_past_its_deadline_costs_that_and_says_that_files_may_still_come(
    config: ProfileConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = Slow(FakeEngine())
    await captured(config, 1, profiler)
    assert item(config, 1).state == "failed"
    assert item(config, 1).reason == "timeout: stop did not return within 0.2 s; its files may still come"
    assert [(stop.name, stop.alive, stop.came) for stop in still_waiting(config)] == [("replica 0", True, ())]
    assert await asyncio.to_thread(run, ["ls", str(config.save_path), "--pending"]) == 3
    assert "replica 0" in capsys.readouterr().out
    await profiler.write()


async def test_files_that_come_late_stand_in_the_manifest_and_nothing_is_waited_for(
    config: ProfileConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = Slow(FakeEngine())
    await captured(config, 1, profiler)
    await profiler.write()
    await until(lambda: item(config, 1).state == "ok")
    assert len(item(config, 1).artifacts) == 2
    assert not still_waiting(config)
    assert await asyncio.to_thread(run, ["ls", str(config.save_path), "--pending"]) == 0
    assert "nothing is waited for" in capsys.readouterr().out


async def test_why_an_engine_did_not_start_is_kept_though_its_stop_hangs_too(config: ProfileConfig) -> None:
    engine = FakeEngine()
    engine.fails_to_start = 0
    profiler = Slow(engine)
    await captured(config, 1, profiler)
    assert "worker 0 cannot start" in (item(config, 1).reason or "")
    assert not still_waiting(config)
    await profiler.write()
    await asyncio.sleep(0.01)
    assert "worker 0 cannot start" in (item(config, 1).reason or "")


async def test_the_next_capture_gives_a_late_stop_up_and_what_it_brings_is_still_listed(
    config: ProfileConfig,
) -> None:
    await given_up(config)
    (stop,) = still_waiting(config)
    assert len(stop.came) == 2
    assert item(config, 1).state == "failed"
    assert item(config, 2).state == "ok"


async def test_a_later_capture_enters_what_a_stop_brought_that_was_given_up(config: ProfileConfig) -> None:
    other = await given_up(config)
    await captured(config, 3, other)
    assert (item(config, 1).state, len(item(config, 1).artifacts)) == ("ok", 2)
    assert not still_waiting(config)


async def test_what_a_process_that_is_gone_waited_for_is_entered_on_request(
    config: ProfileConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    await test_the_next_capture_gives_a_late_stop_up_and_what_it_brings_is_still_listed(config)
    layout = RunLayout(config.save_path).step(1)
    assert take_in(layout, waiting(layout)) == [], "this process runs, and enters its own"
    _make_its_process_one_that_is_gone(config)
    assert await asyncio.to_thread(run, ["collect", str(config.save_path)]) == 0
    assert "entered: 2 files" in capsys.readouterr().err
    assert item(config, 1).state == "ok"
    assert len(item(config, 1).artifacts) == 2


async def test_sidecars_that_come_one_after_another_are_all_entered_in_the_end_and_told_once(
    config: ProfileConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(pipeline, "artifact_hooks", [lambda path, sidecar: told.append(f"{path}")])
    other = await given_up(config)
    *_, last = sorted(RunLayout(config.save_path).step(1).sidecars())
    last.rename(tmp_path / "not yet")
    await captured(config, 3, other)
    assert (item(config, 1).state, len(item(config, 1).artifacts)) == ("ok", 1)
    (tmp_path / "not yet").rename(last)
    assert [len(stop.came) for stop in still_waiting(config)] == [1]
    await captured(config, 4, other)
    assert (item(config, 1).state, len(item(config, 1).artifacts)) == ("ok", 2)
    assert not still_waiting(config)
    assert pipeline._hooks.drain(20) == []
    assert len([path for path in told if "step_000001" in path]) == 2


async def test_of_a_process_that_is_gone_the_last_sidecar_is_entered_too(
    config: ProfileConfig, tmp_path: Path
) -> None:
    await test_the_next_capture_gives_a_late_stop_up_and_what_it_brings_is_still_listed(config)
    layout = RunLayout(config.save_path).step(1)
    _make_its_process_one_that_is_gone(config)
    *_, last = sorted(layout.sidecars())
    last.rename(tmp_path / "not yet")
    take_in(layout, waiting(layout))
    (tmp_path / "not yet").rename(last)
    take_in(layout, waiting(layout))
    assert (item(config, 1).state, len(item(config, 1).artifacts)) == ("ok", 2)


class Patient(FakeEngineProfiler):
    """Notes how long it is waited for."""

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
    for path, part in part_files(RunLayout(config.save_path).step(1))[0].items():
        process = msgspec.structs.replace(part.process, pid=gone.pid)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(part, process=process)))
