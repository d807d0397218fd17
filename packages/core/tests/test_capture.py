"""capture(): opening, closing, and what can come between. Spans only: profilers have their own tests.

One file above 400 lines: all cases share one small configuration and the readers of what it leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope
from packages.core.tests.runs import manifest_of, outcomes, step_of
from packages.core.tests.suspensions import CancelledAt
from stepscope import Capture, ProfileConfig, capture, profile_step, span, trajectory, turn
from stepscope._recording.capture import capture as capture_module
from stepscope._recording.fanout import worker_side
from stepscope._recording.process import failures, identity, manifest_part
from stepscope._recording.session.session import Session
from stepscope._recording.spans import slot
from stepscope._recording.spans.scopes import current
from stepscope.engines import EngineCapture
from stepscope.errors import CaptureError, CaptureOpenError, ConfigError, EngineError, MissingArtifactsError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Expectation, Manifest
from stepscope.files.sidecar import Artifact
from stepscope.files.spans import Span
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope.testing.recorded_run import finished_spans
from stepscope_report import cli


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    """Return a configuration that captures steps 2 and 3 and profiles no role."""
    return ProfileConfig(
        save_path=str(tmp_path / "run"), steps=[2, 3], roles={"rollout": {"ranks": "all", "profiler": "off"}}
    )


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert slot.session() is None
    assert capture_module.opened() is None


def spans_of(config: ProfileConfig, step: int) -> dict[str, Span]:
    return {line.stage: line for line in finished_spans(config.save_path, step)}


def expectation(config: ProfileConfig, step: int, name: str) -> Expectation:
    return outcomes(step_of(config, step))[name]


def test_a_selected_step_is_recorded(config: ProfileConfig) -> None:
    with capture(2, config=config) as cap, span("update", role="actor"):
        pass
    assert cap.result.captured
    assert spans_of(config, 2)["update"].role == "actor"
    assert manifest_of(step_of(config, 2)).state == "ok"


def test_a_step_that_is_not_selected_has_no_folder(config: ProfileConfig) -> None:
    with capture(7, config=config) as cap, span("update"):
        pass
    assert not cap.result.captured
    assert not RunLayout(config.save_path).steps()  # the flight recorder keeps its time in the run's folder
    cap.result.raise_for_missing()


def test_open_and_close_for_loops_that_cannot_indent(config: ProfileConfig) -> None:
    for step in range(5):
        cap = capture(step, config=config).open()
        with span("update"):
            pass
        cap.close()
        cap.close()
    assert list(RunLayout(config.save_path).steps()) == [2, 3]


def test_a_second_capture_is_refused_and_leaves_the_open_one(config: ProfileConfig) -> None:
    with capture(2, config=config):
        with (
            pytest.raises(CaptureOpenError, match=r"step 2 .* step 3"),
            capture(3, config=config),
        ):
            pass
        with span("after"):
            pass
    assert "after" in spans_of(config, 2)
    assert list(RunLayout(config.save_path).steps()) == [2]


def test_opening_a_capture_that_is_open_is_refused_and_leaves_it_open(config: ProfileConfig) -> None:
    cap = capture(2, config=config).open()
    with pytest.raises(CaptureError, match=r"step 2 .*new one"), cap:
        pass
    with span("after"):
        pass
    cap.close()
    assert "after" in spans_of(config, 2)


def test_a_capture_is_used_once(config: ProfileConfig) -> None:
    cap = capture(2, config=config)
    with cap:
        pass
    with pytest.raises(CaptureError, match="closed"):
        cap.open()


def test_the_bodys_exception_is_recorded_and_goes_on(config: ProfileConfig) -> None:
    with pytest.raises(KeyError, match="mine"), capture(2, config=config), span("update"):
        raise KeyError("mine")
    assert manifest_of(step_of(config, 2)).processes[0].error == "KeyError: 'mine'"
    assert spans_of(config, 2)["update"].error == "KeyError: 'mine'"


def session_of(cap: capture_module.Capture) -> Session:
    assert cap._life is not None
    assert cap._life.session is not None
    return cap._life.session


@pytest.mark.usefixtures("in_production")
def test_the_bodys_exception_wins_over_trouble_in_closing(
    config: ProfileConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    cap = capture(2, config=config)
    with pytest.raises(KeyError, match="mine"), pytest.MonkeyPatch.context() as patched, cap:
        session = session_of(cap)
        patched.setattr(session, "close", broken)
        raise KeyError("mine")
    assert "disabled closing a capture" in caplog.text
    session.close()


def test_a_span_of_another_step_is_labelled(config: ProfileConfig) -> None:
    with capture(3, config=config), stepscope.trajectory("t1", step=2, policy_version=1):
        pass
    line = spans_of(config, 3)["trajectory"]
    assert (line.trajectory, line.step, line.policy_version) == ("t1", 2, 1)


def test_a_trajectory_begun_before_the_capture_keeps_its_name(config: ProfileConfig) -> None:
    with stepscope.trajectory("early"), stepscope.turn(3), capture(2, config=config), span("generate"):
        pass
    line = spans_of(config, 2)["generate"]
    assert (line.trajectory, line.turn, line.parent) == ("early", 3, None)


@pytest.mark.parametrize("configures", [True, False])
def test_a_program_that_changes_its_working_directory_stays_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configures: bool
) -> None:
    from stepscope._recording.capture import configure

    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    config = ProfileConfig(save_path="outputs/profile", steps=[0, 1], roles={"*": {"profiler": "off"}})
    monkeypatch.setattr(configure, "_configured", None)
    given = configure.configure(config) if configures else config
    for step in range(2):
        with capture(step, config=given), span("generate", role="rollout"):
            os.chdir(tmp_path / "work")
    stepscope.flush()
    assert cli.run(["ls", str(tmp_path / "outputs" / "profile")]) == 0
    assert not list((tmp_path / "work").iterdir())
    assert sorted(RunLayout(tmp_path / "outputs" / "profile").steps()) == [0, 1]


def test_selecting_no_steps_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stepscope._recording.capture import configure

    monkeypatch.setattr(configure, "_configured", None)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "stepscope"):
        for step in range(3):
            with capture(step):
                pass
    assert caplog.text.count("captures nothing") == 1


def test_what_is_skipped_says_why(config: ProfileConfig) -> None:
    with capture(2, config=config):
        pass
    item = expectation(config, 2, "torch trace")
    assert item.state == "skipped"
    assert "role 'trainer'" in str(item.reason)


def test_a_budget_of_seconds_truncates_and_says_so(tmp_path: Path) -> None:
    config = ProfileConfig(
        save_path=str(tmp_path / "run"), steps=[2], roles={"x": {}}, budget={"seconds": 0.05}
    )
    with capture(2, config=config) as cap:
        with span("before"):
            pass
        session = session_of(cap)
        assert session._watchdog is not None
        session._watchdog.thread.join(10)
        with span("after"):
            pass
    assert set(spans_of(config, 2)) == {"before"}
    item = expectation(config, 2, "spans")
    assert item.state == "partial"
    assert item.truncated is not None
    assert "budget.seconds" in item.truncated


def test_a_full_budget_of_spans_is_partial(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path / "run"), steps=[2], roles={"x": {}}, budget={"spans": 2})
    with capture(2, config=config) as cap:
        for _ in range(5):
            with span("many"):
                pass
    reason = str(expectation(config, 2, "spans").reason)
    assert reason.startswith("3 spans ")
    assert reason.endswith("budget.spans is 2")
    assert len(all_spans(config, 2)) == 2
    with pytest.raises(MissingArtifactsError, match="3 spans were dropped"):
        cap.result.raise_for_missing()


# Engines


async def test_ten_thousand_concurrent_trajectories(config: ProfileConfig) -> None:
    async def rollout(number: int) -> None:
        with trajectory(f"t{number}", policy_version=number):
            await all_begun.wait()
            for index in range(2):
                with turn(index):
                    await asyncio.sleep(0)
                    async with span("tool", role="env"):
                        await asyncio.sleep(0)

    async with capture(2, config=config):
        all_begun = asyncio.Event()
        with span("rollout"):
            rollouts = [asyncio.create_task(rollout(number)) for number in range(10_000)]
            await asyncio.sleep(0)
            all_begun.set()
            await asyncio.gather(*rollouts)
    spans = {line.span: line for line in all_spans(config, 2)}
    (root,) = (line for line in spans.values() if line.stage == "rollout")
    counted = Counter(line.stage for line in spans.values())
    assert counted == {"rollout": 1, "trajectory": 10_000, "turn": 20_000, "tool": 20_000}
    assert len({line.trajectory for line in spans.values()}) == 10_001
    above = {"trajectory": "rollout", "turn": "trajectory", "tool": "turn"}
    for line in spans.values():
        if line is root:
            continue
        parent = spans[line.parent or 0]
        assert parent.stage == above[line.stage]
        assert line.policy_version == int(str(line.trajectory)[1:])
        if parent is not root:
            assert line.trajectory == parent.trajectory
            assert line.turn == parent.turn or line.stage == "turn"
    assert manifest_of(step_of(config, 2)).state == "ok"


async def test_engines_are_started_and_stopped_with_the_capture(config: ProfileConfig) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with capture(2, config=config, engines=[FakeEngineProfiler(engine) for engine in engines]) as cap:
        assert all(engine.recordings for engine in engines)
    assert not any(engine.recordings for engine in engines)
    assert cap.result.path is not None
    for replica in (0, 1):
        item = expectation(config, 2, f"replica {replica}")
        assert item.state == "ok"
        assert all((cap.result.path / artifact.path).stat().st_size for artifact in item.artifacts)


async def test_a_replica_that_hangs_costs_its_deadline_and_not_everyones(tmp_path: Path) -> None:
    config = ProfileConfig(
        save_path=str(tmp_path / "run"),
        steps=[2],
        roles={"rollout": {"ranks": "all", "profiler": "off"}},
        budget={"fanout_seconds": 1},
    )
    hung, well = FakeEngine(), FakeEngine()
    hung.hangs_on_start = 0
    began = asyncio.get_running_loop().time()
    async with capture(2, config=config, engines=[FakeEngineProfiler(hung), FakeEngineProfiler(well)]):
        assert well.recordings
    assert asyncio.get_running_loop().time() - began < 10
    assert expectation(config, 2, "replica 0").state == "failed"
    assert str(expectation(config, 2, "replica 0").reason).startswith("timeout: start ")
    assert expectation(config, 2, "replica 1").state == "ok"


async def test_an_engine_that_dies_meanwhile_is_failed_and_the_body_goes_on(config: ProfileConfig) -> None:
    engine = FakeEngine()
    async with capture(2, config=config, engines=[FakeEngineProfiler(engine)]):
        engine.dead = True
    item = expectation(config, 2, "replica 0")
    assert item.state == "failed"
    assert item.reason is not None
    assert item.reason.startswith("stop: EngineError")


async def test_an_engine_that_cannot_start_is_failed_and_stopped(config: ProfileConfig) -> None:
    engine = FakeEngine()
    engine.fails_to_start = 1
    async with capture(2, config=config, engines=[FakeEngineProfiler(engine)]) as cap:
        assert not engine.recordings
    item = expectation(config, 2, "replica 0")
    assert item.state == "failed"
    with pytest.raises(MissingArtifactsError, match="replica 0: failed"):
        cap.result.raise_for_missing()


async def test_ranks_select_replicas(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path / "run"), steps=[2], roles={"rollout": {"ranks": [2]}})
    engines = [FakeEngine(workers=2), FakeEngine(workers=2)]
    async with capture(2, config=config, engines=[FakeEngineProfiler(engine) for engine in engines]):
        assert not engines[0].recordings
        assert engines[1].recordings
    assert str(expectation(config, 2, "replica 0").reason).endswith("roles.rollout.ranks [2]")


@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
def test_cancelled_at_any_await_a_capture_leaves_nothing_open_and_the_truth(
    tmp_path: Path, again: bool
) -> None:
    async def recorded(step: int, config: ProfileConfig, engines: list[FakeEngine]) -> None:
        profilers = [FakeEngineProfiler(engine) for engine in engines]
        async with capture(step, config=config, engines=profilers), span("update"):
            await asyncio.sleep(0)
            whole.append(step)

    whole: list[int] = []
    for suspension in itertools.count(1):
        config = ProfileConfig(
            save_path=str(tmp_path / f"run{suspension}"),
            steps=[2, 3],
            roles={"rollout": {"ranks": "all", "profiler": "off"}},
        )
        engines = [FakeEngine(), FakeEngine()]
        cancelled = CancelledAt(suspension, again=again)
        outcome = cancelled.run(recorded(2, config, engines))
        assert slot.session() is None
        assert capture_module.opened() is None
        assert not any(engine.recordings for engine in engines), suspension
        if RunLayout(config.save_path).steps():
            error = told_all_of(config, 2)
            assert (error is None) == (2 in whole), (suspension, error)
            assert error is None or "CancelledError" in error
        whole.clear()
        asyncio.run(recorded(3, config, engines))
        assert manifest_of(step_of(config, 3)).state == "ok", suspension
        told_all_of(config, 3)
        if not cancelled.came:
            assert outcome is None
            assert suspension > 3
            break
        assert isinstance(outcome, asyncio.CancelledError), suspension


def told_all_of(config: ProfileConfig, step: int) -> str | None:
    """Assert that the manifest of a closed capture is final and its files exist. Return its error."""
    folder = RunLayout(config.save_path).step(step)
    (part,) = manifest_of(step_of(config, step)).processes
    assert part.closed is not None
    for item in part.expected:
        assert item.pending is None, item
        assert (item.state == "ok") == (item.reason is None), item
        assert all((folder.root / artifact.path).exists() for artifact in item.artifacts), item
    return part.error


class Flag:
    """An event that several event loops may share."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    async def wait(self) -> None:
        while not self.is_set:  # noqa: ASYNC110  # an asyncio.Event has one loop
            await asyncio.sleep(0.001)


class HeldEngineProfiler(FakeEngineProfiler):
    """Its stop waits for `goes_on`, having set `asked`."""

    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.asked, self.goes_on = Flag(), Flag()
        self.stops = 0

    async def stop(self) -> list[Artifact]:
        self.stops += 1
        self.asked.set()
        await self.goes_on.wait()
        return await super().stop()


async def test_close_leaves_a_capture_to_the_task_that_is_closing_it(config: ProfileConfig) -> None:
    profiler = HeldEngineProfiler()
    cap = await capture(2, config=config, engines=[profiler]).aopen()
    closing = asyncio.create_task(cap.aclose())
    await profiler.asked.wait()
    cap.close()
    assert capture_module.opened() is cap
    profiler.goes_on.set()
    await closing
    assert capture_module.opened() is None
    assert expectation(config, 2, "replica 0").state == "ok"


def test_close_ends_a_capture_whose_loop_stopped_in_the_middle_of_closing_it(config: ProfileConfig) -> None:
    profiler = HeldEngineProfiler()
    closing: list[asyncio.Task[None]] = []

    async def step() -> Capture:
        cap = await capture(2, config=config, engines=[profiler]).aopen()
        closing.append(asyncio.create_task(cap.aclose()))
        await profiler.asked.wait()
        return cap

    loop = asyncio.new_event_loop()
    cap = loop.run_until_complete(step())  # as where a Ctrl-C ends it
    profiler.goes_on.set()
    cap.close()
    assert capture_module.opened() is None
    assert not profiler.engine.recordings
    assert expectation(config, 2, "replica 0").state == "ok"
    loop.run_until_complete(closing[0])
    loop.close()
    assert expectation(config, 2, "replica 0").state == "ok"


async def test_a_cancellation_while_a_failed_opening_is_rolled_back_goes_on_up(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    monkeypatch.setattr(Session, "start_profiler", full)
    profiler = HeldEngineProfiler()
    opening = asyncio.create_task(capture(2, config=config, engines=[profiler]).aopen())
    await profiler.asked.wait()
    opening.cancel()
    await asyncio.sleep(0)
    profiler.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert capture_module.opened() is None
    assert not profiler.engine.recordings


async def test_a_cancelled_closing_waits_for_its_engines_and_tells_them_once(config: ProfileConfig) -> None:
    profiler = HeldEngineProfiler()
    cap = await capture(2, config=config, engines=[profiler]).aopen()
    closing = asyncio.create_task(cap.aclose())
    await profiler.asked.wait()
    await cancel_twice(closing)
    profiler.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert profiler.stops == 1
    assert capture_module.opened() is None
    assert expectation(config, 2, "replica 0").state == "ok"


def test_an_engines_stop_goes_on_though_the_loop_of_its_capture_ends(config: ProfileConfig) -> None:
    profiler = HeldEngineProfiler()

    async def step() -> None:
        cap = await capture(2, config=config, engines=[profiler]).aopen()
        closing.append(asyncio.create_task(cap.aclose()))
        await profiler.asked.wait()
        threading.Timer(0.05, profiler.goes_on.set).start()

    closing: list[asyncio.Task[None]] = []
    asyncio.run(step())  # which cancels what is left
    assert closing[0].cancelled()
    assert profiler.stops == 1
    assert not profiler.engine.recordings
    assert capture_module.opened() is None
    assert expectation(config, 2, "replica 0").state == "ok"


class CancelledEngineProfiler(FakeEngineProfiler):
    async def stop(self) -> list[Artifact]:
        await super().stop()
        raise asyncio.CancelledError  # of a task of its own


async def test_a_cancellation_of_an_engines_own_making_is_its_failure(config: ProfileConfig) -> None:
    async with capture(2, config=config, engines=[CancelledEngineProfiler(FakeEngine())]):
        pass
    assert expectation(config, 2, "replica 0").reason == "stop: cancelled"


class StartlessEngineProfiler(HeldEngineProfiler):
    """Its start never returns, and undoes nothing when it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.cancelled = Flag(), False

    async def start(self, capture: EngineCapture) -> None:
        self.told.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
async def test_a_cancelled_opening_ends_the_starts_and_stops_their_engines_once(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")  # as in a run: it would raise what is swallowed
    profiler = StartlessEngineProfiler()
    opening = asyncio.create_task(capture(2, config=config, engines=[profiler]).aopen())
    await profiler.told.wait()
    opening.cancel()
    await asyncio.wait_for(profiler.asked.wait(), 20)
    assert profiler.cancelled
    if again:
        await cancel_twice(opening)
    profiler.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert profiler.stops == 1
    assert capture_module.opened() is None
    assert "CancelledError" in str(expectation(config, 2, "spans").reason)


async def cancel_twice(task: asyncio.Task[Any]) -> None:
    for _ in range(2):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()


async def test_a_cancellation_while_a_failed_step_closes_is_raised_in_the_place_of_its_exception(
    config: ProfileConfig,
) -> None:
    profiler = HeldEngineProfiler()

    async def body_raises() -> None:
        async with capture(2, config=config, engines=[profiler]):
            raise ValueError("of the step")

    step = asyncio.create_task(body_raises())
    await profiler.asked.wait()
    step.cancel()
    profiler.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert expectation(config, 2, "replica 0").state == "ok"


async def test_a_second_cancellation_while_a_cancelled_step_closes_leaves_its_handler_alone(
    config: ProfileConfig,
) -> None:
    profiler = HeldEngineProfiler()
    handled: list[bool] = []

    async def step() -> None:
        try:
            async with capture(2, config=config, engines=[profiler]):
                begun.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            handled.append(True)
            raise

    begun = asyncio.Event()
    stepping = asyncio.create_task(step())
    await begun.wait()
    stepping.cancel("first")
    await profiler.asked.wait()
    await cancel_twice(stepping)
    profiler.goes_on.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await stepping
    assert handled
    assert cancelled.value.args == ("first",) or sys.version_info < (3, 11)  # which says it to nobody


# Before the first step


def test_the_manifest_knows_whether_prepare_ran(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_prepared_in", 0)
    with capture(2, config=config):
        pass
    stepscope.prepare(config=config)
    with capture(3, config=config):
        pass
    parts = [part for step in (2, 3) for part in manifest_of(step_of(config, step)).processes]
    assert [part.prepared for part in parts] == [False, True]


async def test_prepare_finds_what_would_go_wrong(config: ProfileConfig) -> None:
    class Unprofiled(FakeEngineProfiler):
        def check(self) -> None:
            raise EngineError("profiling is off in this engine. Fix: pass profiler_config=...")

    await stepscope.aprepare(engines=[FakeEngineProfiler(FakeEngine())], config=config)
    with pytest.raises(CaptureError, match=r"1 place.*\n.*replica 1: EngineError"):
        await stepscope.aprepare(
            engines=[FakeEngineProfiler(FakeEngine()), Unprofiled(FakeEngine())], config=config
        )


async def test_prepare_says_what_an_engine_cannot_record(
    config: ProfileConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_warned", set())

    def asking(**engine: object) -> ProfileConfig:
        return config.replace(roles={"rollout": {"engine": engine}, "*": {}})

    engines = [FakeEngineProfiler(FakeEngine())]
    await stepscope.aprepare(engines=engines, config=asking(by_stage=True))
    assert "replica 0: by_stage " in caplog.text
    with pytest.raises(CaptureError, match=r"replica 0: EngineError: .*'depth'"):
        await stepscope.aprepare(engines=engines, config=asking(extra={"depth": 3}))
    unused = asking(extra={"depth": 3}, profiler=False)  # no capture would ask it
    await stepscope.aprepare(engines=engines, config=unused)


async def test_prepare_warns_of_stops_that_take_long(
    config: ProfileConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_warned", set())
    engines = [FakeEngineProfiler(FakeEngine())]
    await stepscope.aprepare(engines=engines, config=config)
    assert "stacks and memory" not in caplog.text
    heavy = config.replace(torch={"with_stack": True})
    for _ in range(2):
        await stepscope.aprepare(engines=engines, config=heavy)
    assert len(re.findall(r"25 to 108 s .* 30 s\. .*roles", caplog.text)) == 1


def test_prepare_names_a_role_that_nothing_known_before_the_run_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @profile_step(role="verifier")
    def verify() -> None: ...

    roles = {"trainr": {"ranks": "first"}, "verif*": {"ranks": "first"}, "*": {"ranks": "first"}}
    stepscope.prepare(config=ProfileConfig(save_path=str(tmp_path), steps=[2], roles=roles))
    (message,) = caplog.messages
    assert re.search(r"roles\.trainr .*\btrainer\b", message)
    assert "'trainer'?" in message


def test_prepare_starts_the_profiler_for_nothing_in_a_run_that_is_only_triggered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []

    class Backend:
        def __init__(self, tool: str, _: ProfileConfig) -> None:
            self.tool = tool

        def check(self) -> None: ...

        def prepare(self) -> None:
            prepared.append(self.tool)

    monkeypatch.setattr(worker_side, "load_backend", Backend)
    monkeypatch.setattr(worker_side, "library_loaded", lambda _: True)
    stepscope.prepare(config=ProfileConfig(save_path=str(tmp_path)))
    assert prepared == ["torch"]


def test_prepare_warns_of_what_is_wrong_in_a_run_that_is_only_triggered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    stepscope.prepare(config=ProfileConfig(save_path=str(tmp_path / "file" / "run")))
    (message,) = caplog.messages
    assert "on request " in message
    assert "save_path" in message


def test_prepare_does_nothing_for_a_run_that_captures_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    never = ProfileConfig(save_path=str(tmp_path / "file" / "run"), control={"requests": False})
    stepscope.prepare(config=never)
    assert not caplog.messages
    with pytest.raises(ConfigError, match="save_path"):
        stepscope.prepare(config=ProfileConfig(save_path=str(tmp_path / "file" / "run"), steps=[1]))


async def test_prepare_does_not_block_a_running_loop(config: ProfileConfig) -> None:
    with pytest.raises(CaptureError, match="await aprepare"):
        stepscope.prepare(config=config)


def test_a_manifest_that_was_folded_earlier_does_not_come_last(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait and what follows the capture fold it on threads of their own; who looked later writes later."""
    with capture(2, config=config) as cap:
        pass
    order: list[str] = []
    files = cap.result._files
    assert files is not None
    stepscope.flush()  # the exporter folds it too
    another = threading.Thread(target=files.fold)

    def write(step: StepLayout, manifest: Manifest) -> None:
        if threading.current_thread() is not another:
            another.start()
            another.join(0.2)  # long enough for who is not held back
        order.append(threading.current_thread().name)

    monkeypatch.setattr(manifest_part, "write_manifest", write)
    files.fold()
    another.join()
    assert order == [threading.current_thread().name, another.name]


def test_a_step_that_is_captured_again_keeps_both_recordings(config: ProfileConfig) -> None:
    for attempt in ("first", "second"):
        with capture(2, config=config) as cap, span(attempt):
            pass
        cap.result.raise_for_missing()
    layout = RunLayout(config.save_path).step(2)
    assert len(list(layout.processes.glob("*.json"))) == 2
    read = [path.read_text() for path in sorted(layout.spans.glob("*.jsonl"))]
    assert [("first" in text, "second" in text) for text in read] == [(False, True), (True, False)]


def all_spans(config: ProfileConfig, step: int) -> list[Span]:
    return sorted(finished_spans(config.save_path, step), key=lambda line: line.span)


@pytest.mark.parametrize("tool", ["off", "torch"])
@pytest.mark.parametrize("within", [True, False])
def test_a_span_that_is_entered_twice_is_recorded_once_and_said(
    config: ProfileConfig, tool: str, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tool == "torch":
        pytest.importorskip("torch")
        config = config.replace(roles={"*": {"ranks": "all"}}, torch={"activities": ["cpu"]})
    with capture(2, config=config):
        outer, again = span("outer"), span("generate", role="rollout")
        with outer, again:
            if not within:
                again.__exit__(None, None, None)
            with pytest.raises(CaptureError, match=r"'generate' .*`with`"):
                again.__enter__()
            monkeypatch.setenv("STEPSCOPE_RAISE", "0")
            with again as same:
                same.set(tokens=3)
            assert current.get() is outer
        assert current.get() is None
    assert [line.stage for line in all_spans(config, 2)] == ["outer", "generate"]


async def test_tasks_that_share_a_span_object_record_it_once(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    with capture(2, config=config):
        shared = span("tool")

        async def use() -> None:
            with shared:
                await asyncio.sleep(0)
                with span("inside"):
                    await asyncio.sleep(0)

        await asyncio.gather(*(use() for _ in range(5)))
    tool, *inside = all_spans(config, 2)
    assert tool.stage == "tool"
    assert [line.parent for line in inside] == [tool.span, None, None, None, None]


def test_a_trajectory_that_nobody_records_is_entered_once_too() -> None:
    place = stepscope.trajectory("t")
    with place:
        assert (stepscope.carrier() or {}).get("trajectory") == "t"
    with pytest.raises(CaptureError, match="a second time"), place:
        pass
    assert current.get() is None
