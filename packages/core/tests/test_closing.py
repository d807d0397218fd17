"""Closing of a capture: one fold, and nothing lost when it is interrupted or called twice."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import handling, outcomes, spans_alone
from stepscope import ProfileConfig, capture, flush
from stepscope._recording.process import exports, manifest_part, shutdown
from stepscope._recording.session import pipeline
from stepscope._recording.spans.log import SpanLog
from stepscope.engines import EngineProfiler
from stepscope.files import manifest_parts
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending, Manifest, ProcessPart
from stepscope.files.sidecar import Artifact
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "with an engine"])
def test_closing_folds_the_manifest_once(
    has_engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds: list[int] = []

    def fold(read: Sequence[ProcessPart]) -> Manifest:
        if threading.current_thread().name != "stepscope-export":  # folds once more, after the close
            folds.append(len(read))
        return manifest_parts.fold(read)

    config = ProfileConfig(save_path=str(tmp_path), steps=[1], roles={"none": {}})
    engines: list[EngineProfiler] | None = [FakeEngineProfiler(FakeEngine())] if has_engine else None
    cap = capture(1, config=config, engines=engines).open()
    monkeypatch.setattr(manifest_part, "fold", fold)
    cap.close()
    assert folds == [1]


class CountedStops(FakeEngineProfiler):
    """A profiler that counts its stops, each of which waits for an event if there is one."""

    def __init__(self, engine: FakeEngine, may_stop: threading.Event | None = None) -> None:
        super().__init__(engine)
        self.begun = self.over = 0
        self._may_stop = may_stop

    async def stop(self) -> list[Artifact]:
        self.begun += 1
        if self._may_stop is not None:
            await asyncio.to_thread(self._may_stop.wait, 30)
        artifacts = await super().stop()
        self.over += 1
        return artifacts


def config_of(folder: Path, **settings: Any) -> ProfileConfig:
    """Return a configuration that records the spans of steps 1 to 9."""
    return spans_alone(folder, steps="1:10", **settings)


def test_two_tasks_that_close_a_capture_stop_its_engine_once(tmp_path: Path) -> None:
    profiler = CountedStops(FakeEngine())

    async def step() -> None:
        cap = await capture(1, config=config_of(tmp_path), engines=[profiler]).aopen()
        await asyncio.gather(cap.aclose(), cap.aclose())
        assert cap.state == "closed"

    asyncio.run(step())
    assert profiler.begun == 1


def test_a_task_joins_the_closing_that_a_thread_began(tmp_path: Path) -> None:
    may_stop = threading.Event()
    profiler = CountedStops(FakeEngine(), may_stop)
    cap = capture(1, config=config_of(tmp_path), engines=[profiler]).open()
    thread = threading.Thread(target=cap.close)
    thread.start()
    while not profiler.begun:
        time.sleep(0.001)
    threading.Timer(0.05, may_stop.set).start()
    asyncio.run(cap.aclose())
    assert (profiler.begun, profiler.over, cap.state) == (1, 1, "closed")
    thread.join(30)


def test_a_ctrl_c_while_a_capture_closes_comes_up_once_all_is_done(tmp_path: Path) -> None:
    may_stop = threading.Event()
    profiler = CountedStops(FakeEngine(), may_stop)
    cap = capture(1, config=config_of(tmp_path), engines=[profiler]).open()
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    threading.Timer(0.15, may_stop.set).start()
    with pytest.raises(KeyboardInterrupt):
        cap.close()
    assert (profiler.begun, profiler.over, cap.state) == (1, 1, "closed")
    exports.exporter().drain(10)
    assert RunLayout(tmp_path).step(1).manifest.exists()
    with capture(2, config=config_of(tmp_path)) as following:
        assert following.selected


def test_the_end_of_the_process_does_not_wait_longer_for_an_engine_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "GRACE_S", 15.0)  # to write files in, on a busy machine
    never = threading.Event()
    profiler = CountedStops(FakeEngine(), never)
    cap = capture(1, config=config_of(tmp_path), engines=[profiler]).open()
    thread = threading.Thread(target=cap.close)
    thread.start()
    while not profiler.begun:
        time.sleep(0.001)
    began = time.monotonic()
    shutdown.close_everything(Ending("signal", "SIGTERM"), deadline_s=0.2)
    waited_s, state = time.monotonic() - began, cap.state
    is_written = RunLayout(tmp_path).step(1).manifest.exists()
    never.set()  # before any assertion can fail: later tests would find the capture open
    thread.join(30)
    assert waited_s < 20
    assert (state, is_written) == ("closed", True)


def test_captures_that_were_rolled_back_count_among_the_steps_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no promise")

    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    monkeypatch.setattr(pipeline, "promise", fail)
    for step in range(1, 5):
        with capture(step, config=config_of(tmp_path, budget={"keep_steps": 1})):
            pass
    assert not exports.exporter().drain(60)
    assert list(RunLayout(tmp_path).steps()) == [4]


def test_a_handler_that_exits_while_a_session_closes_leaves_it_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_spans = SpanLog.close

    def close(log: SpanLog, *arguments: Any) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        close_spans(log, *arguments)

    def leave(*_: object) -> None:
        cap.close()  # as the handler does that a capture puts in front of the user's
        sys.exit(3)

    cap = capture(1, config=config_of(tmp_path)).open()
    monkeypatch.setattr(SpanLog, "close", close)
    with handling(signal.SIGTERM, leave), pytest.raises(SystemExit):
        cap.close()
    flush()
    assert [name for name, item in outcomes(cap.result).items() if item.pending] == []


@pytest.mark.parametrize("profiler", ["off", "on"])
def test_a_step_whose_folder_cannot_be_made_is_not_said_to_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, profiler: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")  # the failures of this test are no defects
    caplog.set_level(logging.INFO)
    config = ProfileConfig.from_mapping(
        {"save_path": str(tmp_path), "steps": [1, 2], "roles": {"*": {"profiler": profiler}}}
    )
    with capture(1, config=config):
        pass
    RunLayout(tmp_path).step(2).root.write_text("in the way")
    with capture(2, config=config) as cap:
        pass
    exports.exporter().drain(30)  # it fails to write, too
    assert "not captured: NotADirectoryError" in cap.result.summary()
    assert "step 2 captured" not in caplog.text
