"""Tests of the event loop on which SGLang is called, and of callers that give up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fake_sglang import FakeEngine, FakeManager, asked, recorded

from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import files_below
from stepscope_sglang import SglangProfiler


def in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in a thread with an event loop of its own, as stepscope does for synchronous code."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="stepscope-loop")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def stops_slowly(manager: FakeManager) -> asyncio.Event:
    """Have each stop wait for the event that is returned."""
    written, stop = asyncio.Event(), manager.stop_profile

    async def slow() -> None:
        await written.wait()
        await stop()

    manager.stop_profile = slow  # type: ignore[method-assign]
    return written


async def until_stopped(manager: FakeManager) -> None:
    """Generate as long as the manager records."""
    while manager.recording:
        await manager.generate(1, "DECODE")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Provide an engine with an event loop of its own, which does not run."""
    loop = asyncio.new_event_loop()
    yield FakeEngine(FakeManager(), loop=loop)
    loop.close()


def until_done(engine: FakeEngine, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on the engine's loop."""
    assert engine.loop is not None
    engine.loop.run_until_complete(work)


def test_synchronous_code_is_recorded_on_the_engines_own_loop(engine: FakeEngine, tmp_path: Path) -> None:
    profiler = SglangProfiler(engine)
    in_thread(profiler.start(asked(tmp_path)))
    until_done(engine, engine.tokenizer_manager.generate(3))
    artifacts: list[Artifact] = []

    async def stop() -> None:
        artifacts.extend(await profiler.stop())

    in_thread(stop())
    assert len(artifacts) == 1


@pytest.mark.slow
def test_a_caller_who_gave_up_a_stop_finds_the_engines_loop_free(engine: FakeEngine, tmp_path: Path) -> None:
    manager = engine.tokenizer_manager
    profiler = SglangProfiler(engine)
    in_thread(profiler.start(asked(tmp_path, stop_seconds=0.6)))
    until_done(engine, manager.generate(3))
    written = stops_slowly(manager)

    async def give_up_after_a_while() -> None:
        stopping = asyncio.ensure_future(profiler.stop())
        await asyncio.wait([stopping], timeout=0.6)
        assert not stopping.done()

    in_thread(give_up_after_a_while())
    until_done(engine, manager.generate(3))
    written.set()
    until_done(engine, until_stopped(manager))
    profiler._thread.submit(lambda: None).result()
    assert manager.asked == ["start", "stop"]
    until_done(engine, manager.generate(3))  # a late request for the states may still wait for the loop


def test_time_that_is_up_between_two_generations_waits_for_the_next(
    engine: FakeEngine, tmp_path: Path
) -> None:
    # The loop is the caller's. If stepscope ran it, the caller could not run it to generate.
    manager = engine.tokenizer_manager
    profiler = SglangProfiler(engine)
    in_thread(profiler.start(asked(tmp_path, seconds=1000.0)))
    until_done(engine, manager.generate(2))
    assert profiler._watchdog is not None
    profiler._watchdog.function()
    profiler._thread.submit(lambda: None).result()
    assert manager.recording
    assert manager.asked == ["start"]
    until_done(engine, until_stopped(manager))
    assert manager.asked == ["start", "stop"]


def test_an_expiry_whose_stop_takes_long_leaves_the_loop_to_its_owner(
    engine: FakeEngine, tmp_path: Path
) -> None:
    manager = engine.tokenizer_manager
    written = stops_slowly(manager)
    profiler = SglangProfiler(engine)
    in_thread(profiler.start(asked(tmp_path, seconds=1000.0)))
    until_done(engine, manager.generate(2))
    assert profiler._watchdog is not None
    profiler._watchdog.function()
    for _ in range(50):
        until_done(engine, manager.generate(1, "DECODE"))  # raises if stepscope runs the loop
    written.set()
    until_done(engine, until_stopped(manager))
    assert manager.asked == ["start", "stop"]


def test_a_manager_that_nobody_has_used_becomes_the_callers(tmp_path: Path) -> None:
    manager = FakeManager()

    async def scenario() -> asyncio.AbstractEventLoop:
        assert await recorded(manager, asked(tmp_path), 2)
        return asyncio.get_running_loop()

    assert asyncio.run(scenario()) is manager.event_loop


def test_an_unused_manager_in_synchronous_code_is_refused(tmp_path: Path) -> None:
    manager = FakeManager()
    with pytest.raises(EngineError, match="generate once before"):
        in_thread(SglangProfiler(manager).start(asked(tmp_path)))
    assert manager.asked == []


async def test_a_capture_from_another_loop_goes_to_the_managers_own(tmp_path: Path) -> None:
    manager = FakeManager()
    await manager.generate(1)
    profiler = SglangProfiler(manager)

    def elsewhere() -> None:
        asyncio.run(profiler.start(asked(tmp_path)))

    await asyncio.to_thread(elsewhere)
    await manager.generate(2)
    assert await profiler.stop()


async def test_a_stop_that_was_given_up_still_leaves_its_files(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path)
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    await manager.generate(2)
    manager.silent = "stop"
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(profiler.stop(), 0.05)
    manager.answer.set()
    await asyncio.wrap_future(profiler._thread.submit(lambda: None))
    assert not manager.wedged  # the call to SGLang was not cancelled
    assert [path.suffix for path in files_below(capture.step_dir)] == [".gz", ".json"]


class Taken:
    """An event loop that another thread begins to run after a check has shown that it does not run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.looked = 0

    def is_running(self) -> bool:
        self.looked += 1
        return self.looked > 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)


async def test_a_loop_that_is_taken_meanwhile_is_asked_instead_of_run(tmp_path: Path) -> None:
    manager = FakeManager()
    await manager.generate(1)
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path))
    await manager.generate(2)
    profiler._target._loop = cast(asyncio.AbstractEventLoop, Taken(asyncio.get_running_loop()))
    assert await profiler.stop()
    assert not manager.recording
