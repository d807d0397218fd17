"""Tests of an AsyncLLM, which belongs to one event loop, and whose engine core and worker are processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import stepscope_vllm
from stepscope import CaptureResult, ProfileConfig, capture, span, turn
from stepscope.engines import EngineProfiler
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture, longest_gap_s
from stepscope_report import Engine, step_report
from stepscope_report.timeline import load_step, load_traces
from stepscope_vllm import VllmProfiler

T = TypeVar("T")


class Home:
    """An event loop on a thread of its own, and the engine that belongs to the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: Any = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def close(self) -> None:
        if self.engine is not None:
            self.run(self._shut_down())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    async def _shut_down(self) -> None:
        """Shut the engine down, and wait for its tasks, which hold its sockets."""
        engine, self.engine = self.engine, None
        engine.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # the tasks of a dead engine have ended
            await asyncio.wait(others, timeout=10)


@pytest.fixture(scope="module")
def home(model: str, sizes: dict[str, Any], config: ProfileConfig) -> Iterator[Home]:
    home = Home()

    async def build() -> None:
        arguments = AsyncEngineArgs(model=model, **sizes, **stepscope_vllm.engine_args(config))
        home.engine = AsyncLLM.from_engine_args(arguments)

    try:
        home.run(build())
        yield home
    finally:
        home.close()


_requests = 0


async def generate(engine: Any, tokens: int = 4) -> Any:
    global _requests
    _requests += 1
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    last = None
    async for output in engine.generate("hello world", sampling, f"request-{_requests}"):
        last = output
    return last


class TestConformance(EngineConformance):
    honours: ClassVar[frozenset[str]] = frozenset(
        {"with_stack", "record_shapes", "profile_memory", "iterations"}
    )
    side_by_side: ClassVar[bool] = False

    @pytest.fixture
    def make_profiler(self, home: Home) -> MakeProfiler:
        return lambda tmp_path, replica: VllmProfiler(home.engine, replica=replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        assert isinstance(profiler, VllmProfiler)
        loop = profiler._target.calls.loop()
        assert loop is not None
        generation = asyncio.run_coroutine_threadsafe(generate(profiler.engine, iterations), loop)
        await asyncio.wrap_future(generation)


def test_a_loop_of_the_users_captures_two_steps(home: Home, config: ProfileConfig, run_folder: Path) -> None:
    async def loop() -> None:
        for step in (1, 2):
            async with capture(step, engines=[home.engine], config=config) as cap:
                async with turn(0):
                    with span("generate", role="rollout") as timed:
                        timed.set(**stepscope_vllm.request_facts(await generate(home.engine)))
            cap.result.raise_for_missing()

    home.run(loop())
    for step in (1, 2):
        (trace,) = (run_folder / f"step_{step:06d}" / "traces").rglob("*.pt.trace.json.gz")
        assert f"step_{step:06d}" in trace.name
        (spans,) = (run_folder / f"step_{step:06d}" / "spans").glob("*.jsonl")
        assert '"queued_s"' in spans.read_text()


def test_the_manifest_and_the_report_count_the_same_passes(
    home: Home, config: ProfileConfig, run_folder: Path
) -> None:
    """vLLM also runs iterations without a request."""

    async def loop() -> tuple[Artifact, ...]:
        async with capture(4, engines=[home.engine], config=config) as cap:
            await asyncio.gather(*(generate(home.engine, tokens) for tokens in (8, 3)))
        return artifacts_of(cap.result)

    artifact, noted = home.run(loop())
    assert artifact.iterations == noted.iterations == engine_of(run_folder / "step_000004").iterations


def test_a_paused_engine_that_holds_a_request_is_not_idle(
    home: Home, config: ProfileConfig, run_folder: Path
) -> None:
    async def loop() -> None:
        await home.engine.pause_generation(mode="keep")
        async with capture(5, engines=[home.engine], config=config):
            request = asyncio.ensure_future(generate(home.engine))
            done, _ = await asyncio.wait({request}, timeout=1.5)  # the sampler asks twice a second
        await home.engine.resume_generation()
        await request
        assert not done
        async with capture(6, engines=[home.engine], config=config):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1.1)

    home.run(loop())
    paused, idle = (engine_of(run_folder / f"step_{step:06d}") for step in (5, 6))
    assert (paused.iterations, paused.is_idle) == (0, False)
    assert (paused.held_ns or 0) > (paused.idle_ns or 0)
    assert (idle.iterations, idle.is_idle, idle.held_ns) == (0, True, 0)


def test_an_engine_without_statistics_has_no_counters_of_another_one(
    home: Home, model: str, sizes: dict[str, Any], config: ProfileConfig, run_folder: Path
) -> None:
    """The test calls `do_log_stats` of neither engine."""
    quiet = Home()

    async def build() -> None:
        settings = {**sizes, "disable_log_stats": True, **stepscope_vllm.engine_args(config)}
        quiet.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **settings))
        await generate(quiet.engine)

    try:
        quiet.run(build())
        with capture(8, engines=[home.engine, quiet.engine], config=config) as cap:
            home.run(generate(home.engine, 4))
            quiet.run(generate(quiet.engine, 6))
    finally:
        engine = weakref.ref(quiet.engine)
        quiet.close()
    counters = step_report(load_step(run_folder / "step_000008")).counters
    assert counters is not None
    rows = {(row.of, row.name): row.increase for row in counters.rows}
    assert rows["replica 0", "generation tokens"] == 4
    assert {name for of, name in rows if of == "replica 1"} == {"unfinished requests"}
    cap.result.raise_for_missing()
    for replica, has in ((0, True), (1, False)):
        (sidecar,) = (run_folder / "step_000008").glob(f"traces/rollout/replica{replica}/*trace*.meta.json")
        assert ("requests_running_at_stop" in sidecar.read_text()) is has
    del cap
    gc.collect()
    assert engine() is None  # else it keeps its memory, and later captures find a dead engine


def artifacts_of(result: CaptureResult) -> tuple[Artifact, ...]:
    result.raise_for_missing()
    manifest = result.manifest()
    assert manifest is not None
    items = [item for part in manifest.processes for item in part.expected if item.kind == "engine"]
    return tuple(artifact for item in items for artifact in item.artifacts)


def engine_of(step: Path) -> Engine:
    timeline = load_step(step)
    (row,) = step_report(timeline, load_traces(step, timeline)).engines
    return row


def test_synchronous_code_captures_an_engine_that_lives_in_another_thread(
    home: Home, config: ProfileConfig
) -> None:
    with capture(3, engines="vllm", config=config) as cap:
        home.run(generate(home.engine))
    cap.result.raise_for_missing()


def test_starting_and_stopping_amid_requests_keeps_the_loop_beating_and_the_requests_whole(
    home: Home, tmp_path: Path
) -> None:
    async def loop() -> tuple[float, list[int]]:
        profiler = VllmProfiler(home.engine, replica=0)
        requests = [asyncio.create_task(generate(home.engine, 60)) for _ in range(4)]
        heart = asyncio.create_task(longest_gap_s())
        await asyncio.sleep(0)
        await profiler.start(a_capture(tmp_path))
        await generate(home.engine, 4)
        await profiler.stop()
        done = await asyncio.gather(*requests)
        heart.cancel()
        await asyncio.wait([heart])
        return heart.result(), [len(output.outputs[0].token_ids) for output in done]

    gap_s, tokens = home.run(loop())
    assert tokens == [60] * 4
    assert gap_s < 1.0


def test_a_stop_that_its_caller_gave_up_leaves_the_files_and_the_next_capture_waits_for_it(
    home: Home, tmp_path: Path
) -> None:
    first, second = a_capture(tmp_path, step=1), a_capture(tmp_path, step=2)

    async def loop() -> list[Artifact]:
        profiler = VllmProfiler(home.engine, replica=0)
        await profiler.start(first)
        await generate(home.engine, 60)
        stopping = asyncio.create_task(profiler.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        later = VllmProfiler(home.engine, replica=0)
        await later.start(second)
        await generate(home.engine)
        return await later.stop()

    (artifact,) = home.run(loop())
    assert "step_000002" in str(Path(second.step_dir) / artifact.path)
    assert len(list(Path(first.step_dir).rglob("*.trace.json.gz"))) == 1
    assert len(list(Path(first.step_dir).rglob("*.meta.json"))) == 1


def test_zz_a_dead_engine_is_an_error_at_once(home: Home, tmp_path: Path) -> None:
    """This test comes last in the file, because it kills the engine."""

    async def loop() -> None:
        profiler = VllmProfiler(home.engine, replica=0)
        given = a_capture(tmp_path)
        await profiler.start(given)
        await generate(home.engine)
        artifacts = await profiler.stop()
        worker = artifacts[0].pid
        assert worker is not None
        await profiler.start(msgspec.structs.replace(given, name="dying"))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"dead|Dead"):
            await asyncio.wait_for(profiler.stop(), 30)
        assert await profiler.stop() == []
        with pytest.raises(EngineError, match="a new engine"):
            await asyncio.wait_for(profiler.start(given), 30)

    home.run(loop())
