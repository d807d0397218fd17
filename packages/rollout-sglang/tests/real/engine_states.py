"""Tests of captures on a real engine: every option, every cause of an end, every refusal.

Run by `test_engines.py` for each tested version. This file has more than 500 lines, because all tests use one
engine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang
from tiny_sglang import generate, on_its_loop

from stepscope import ProfileConfig, capture, span
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.recorder import standing
from stepscope.engines.protocol import EngineCapture, Iterations
from stepscope.engines.supported import numbers
from stepscope.errors import EngineError
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.manifest import Expectation, Manifest
from stepscope.files.sidecar import Artifact, Sidecar, Stall
from stepscope.testing.engine_conformance import a_capture, assert_complete, files_below
from stepscope_report import CounterRow, step_report
from stepscope_report.cli.why import ask
from stepscope_report.timeline import load_step
from stepscope_report.waiting import say_call
from stepscope_report.why import Why, why
from stepscope_sglang import SglangProfiler
from stepscope_sglang._driving.in_process import InProcessTarget
from stepscope_sglang._driving.target import counters_here
from stepscope_sglang._versions import PLUGINS_SINCE

VERSION = numbers(sglang.__version__)
SLACK_NS = 50_000_000
"""Largest time between the scheduler's clock readings and the caller's."""
NAMES_STEPS = VERSION >= (0, 5, 11)
"""True if traces name forward passes `step[EXTEND ...]` and `step[DECODE ...]`."""


def asked(root: Path, **changes: Any) -> EngineCapture:
    return msgspec.structs.replace(a_capture(root), **changes)


def record(engine: Any, wanted: EngineCapture, *, tokens: int = 5, requests: int = 1) -> list[Artifact]:
    """Return the artifacts of one capture around one generation, made from synchronous code."""

    async def scenario() -> list[Artifact]:
        profiler = SglangProfiler(engine)
        await profiler.start(wanted)
        if tokens:
            await generate(engine, requests, tokens)
        return await profiler.stop()

    return on_its_loop(engine, scenario())


def counted(result: CaptureResult) -> dict[str, CounterRow]:
    assert result.path is not None
    counters = step_report(load_step(result.path)).counters
    assert counters is not None
    return {row.name: row for row in counters.rows if row.of == "replica 0"}


def test_the_schedulers_counters_of_an_engine_are_told_from_those_of_others(engine: Any) -> None:
    on_its_loop(engine, generate(engine, 1, 4))
    everything, own = counters_here(None), counters_here(InProcessTarget(engine).pids())
    assert {"running requests", "waiting requests", "generation tokens"} <= everything.keys()
    assert {"running requests", "waiting requests"} <= own.keys()
    assert "generation tokens" not in own  # a counter of the front end, which is in this process
    assert counters_here([os.getpid() + 1_000_000]) == {}


def test_the_counters_of_a_step_are_what_the_loop_counts(engine: Any, tmp_path: Path) -> None:
    on_its_loop(engine, generate(engine, 2, 4))  # totals count from the start of the engine
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"ranks": "all"}})

    async def step() -> CaptureResult:
        async with capture(1, engines=[engine], config=config) as cap:
            await asyncio.sleep(1.5)  # the counters are read once a second
            for _ in range(3):
                await generate(engine, requests=2, tokens=5)
            await asyncio.sleep(2.5)
        return cap.result

    rows = counted(on_its_loop(engine, step()))
    assert rows["finished requests"].increase == 6
    assert rows["prompt tokens"].increase == 6 * 8
    assert rows["generation tokens"].increase == 6 * 5
    assert 0 <= rows["KV cache"].most <= 100
    assert {"running requests", "waiting requests"} <= rows.keys()


def events_of(artifact: Artifact, wanted: EngineCapture) -> list[dict[str, Any]]:
    with gzip.open(Path(wanted.step_dir, artifact.path)) as file:
        return list(json.load(file)["traceEvents"])


def steps_of(artifact: Artifact, wanted: EngineCapture) -> list[str]:
    """Return `EXTEND`, `DECODE`... for each forward pass in the file."""
    names = (str(event.get("name")) for event in events_of(artifact, wanted))
    return [name[5:].partition(" ")[0] for name in names if name.startswith("step[")]


def ended(artifact: Artifact, wanted: EngineCapture) -> object:
    file = sidecar_of(Path(wanted.step_dir, artifact.path))
    return msgspec.json.decode(file.read_bytes(), type=Sidecar).options["ended"]


def assert_works(engine: Any, tmp_path: Path) -> None:
    """Assert that the engine generates, is not being recorded, and can be captured."""

    async def scenario() -> None:
        await generate(engine, 1, 3)
        with pytest.raises(RuntimeError, match="not in progress"):
            await engine.tokenizer_manager.stop_profile()

    on_its_loop(engine, scenario())
    wanted = msgspec.structs.replace(a_capture(tmp_path, step=99))
    assert record(engine, wanted)


# Causes of a recording's end.


def test_a_capture_ends_with_our_stop_and_holds_every_iteration(engine: Any, tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    (artifact,) = record(engine, wanted, tokens=5)
    assert_complete(artifact, wanted)
    assert (artifact.rank, artifact.topology, ended(artifact, wanted)) == (0, {"tp": 0}, "stopped")
    assert artifact.pid
    assert artifact.truncated is None
    if NAMES_STEPS:
        assert steps_of(artifact, wanted) == ["EXTEND", *["DECODE"] * 4]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sglang_stops_by_itself_after_the_count_and_is_not_stopped_again(
    engine: Any, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[None] = []
    stop = engine.tokenizer_manager.stop_profile

    async def counted() -> object:
        stops.append(None)
        return await stop()

    monkeypatch.setattr(engine.tokenizer_manager, "stop_profile", counted)
    wanted = asked(tmp_path, iterations=Iterations(count=count))
    (artifact,) = record(engine, wanted, tokens=8)
    assert not stops
    assert ended(artifact, wanted) == "by itself"
    passes = [event for event in events_of(artifact, wanted) if event.get("name") == "aten::embedding"]
    assert len(passes) == 2 * count  # two embeddings in each forward pass


def test_a_count_that_is_not_reached_ends_with_the_capture(engine: Any, tmp_path: Path) -> None:
    wanted = asked(tmp_path, iterations=Iterations(count=50))
    (artifact,) = record(engine, wanted, tokens=4)
    assert ended(artifact, wanted) == "stopped"
    assert artifact.truncated is None
    if NAMES_STEPS:
        assert (artifact.iterations, artifact.iterations_asked) == (4, 50)
        assert str(artifact.note).startswith("4 of 50 ")
    else:
        assert str(artifact.note).startswith("fewer than 50 ")
    assert_works(engine, tmp_path)


COUNTS = numbers(PLUGINS_SINCE) <= VERSION
"""True if schedulers load stepscope's plugin, which shows their number of passes."""


def test_a_later_start_that_was_not_reached_leaves_nothing_armed(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the first 5" if COUNTS else "to nobody"):
        record(engine, asked(tmp_path, iterations=Iterations(start=5)), tokens=5)
    assert_works(engine, tmp_path)


def configured(root: Path, **engine: object) -> ProfileConfig:
    rollout = {"ranks": "all", "engine": engine}
    return ProfileConfig(
        save_path=str(root), steps="1", torch={"activities": ["cpu"]}, roles={"rollout": rollout}
    )


def replica_of(captured: CaptureResult) -> Expectation:
    manifest = captured.manifest()
    assert manifest is not None
    (replica,) = (item for part in manifest.processes for item in part.expected if item.name == "replica 0")
    return replica


def test_an_idle_engine_is_whole_without_a_file_and_nothing_is_left_armed(
    engine: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with capture(1, engines=engine, config=configured(tmp_path)) as cap:
            pass
        replica = replica_of(cap.result)
        assert (replica.state, replica.idle, replica.artifacts) == ("ok", True, ())

    on_its_loop(engine, scenario())
    assert_works(engine, tmp_path)


@pytest.mark.parametrize("count", [None, 16])
def test_a_recording_that_somebody_else_stops_is_partial_with_numbers(
    engine: Any, tmp_path: Path, count: int | None
) -> None:
    async def scenario() -> None:
        config = configured(tmp_path, iterations={"count": count})
        async with capture(1, engines=engine, config=config) as cap:
            await generate(engine, 1, 8)
            await engine.tokenizer_manager.stop_profile()
            await generate(engine, 1, 5)
        replica = replica_of(cap.result)
        artifact, *_ = replica.artifacts
        if not NAMES_STEPS and count is not None:
            assert artifact.ended == "count"  # the number of passes in the file is unknown
            return
        assert (replica.state, artifact.ended) == ("partial", "others")
        if NAMES_STEPS:
            assert artifact.iterations == 8
            assert (replica.reason or "").endswith("it ran 5 more")

    on_its_loop(engine, scenario())
    assert_works(engine, tmp_path)


@pytest.mark.parametrize("by_stage", [False, True])
def test_no_token_comes_while_sglang_writes_and_the_account_bills_that_to_the_profiler(
    engine: Any, tmp_path: Path, by_stage: bool
) -> None:
    """The times are compared with the caller's own clock."""
    tokens_ns: list[int] = []

    async def request() -> None:
        sampling = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
        answers = await engine.async_generate(input_ids=[1, 2, 3], sampling_params=sampling, stream=True)
        tokens_ns.extend([time.time_ns() async for _ in answers])

    async def scenario() -> tuple[Stall, ...]:
        config = configured(tmp_path, iterations={"count": 4}, by_stage=by_stage)
        tokens_ns.clear()
        async with capture(1, engines=engine, config=config) as cap:
            with span("generate", role="rollout"):
                await request()
        artifacts = replica_of(cap.result).artifacts
        return tuple(stall for artifact in artifacts for stall in artifact.stalls if stall.doing == "writing")

    stalls = on_its_loop(engine, scenario())
    assert len(stalls) == (2 if by_stage else 1)
    for stall in stalls:
        assert stall.source == ("stamps" if COUNTS else "file")
        began_ns, ended_ns = stall.start_ns + SLACK_NS, stall.end_ns - SLACK_NS
        assert not [at for at in tokens_ns if began_ns < at < ended_ns]
    breakdown = step_report(load_step(RunLayout(tmp_path).steps()[1].root)).breakdown
    wrote_ns = sum(stall.end_ns - stall.start_ns for stall in stalls)
    assert abs(breakdown.stalled_ns - wrote_ns) < SLACK_NS
    generate_ns = next(line.wall_ns for line in breakdown.lines if line.stage == "generate")
    assert generate_ns <= breakdown.window_ns - breakdown.stalled_ns
    assert_works(engine, tmp_path)


def test_a_capture_that_begins_while_the_engine_generates_has_what_is_left(
    engine: Any, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)

    async def scenario() -> Artifact:
        profiler = SglangProfiler(engine)
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        answers = await engine.async_generate(input_ids=[1, 2, 3], sampling_params=sampling, stream=True)
        await anext(answers)
        await profiler.start(wanted)
        async for _ in answers:
            pass
        (artifact,) = await profiler.stop()
        return artifact

    artifact = on_its_loop(engine, scenario())
    assert_complete(artifact, wanted)
    if NAMES_STEPS:
        assert set(steps_of(artifact, wanted)) == {"DECODE"}
    assert_works(engine, tmp_path)


def test_synchronous_code_is_captured_though_the_loop_stands_still_between_its_calls(
    engine: Any, tmp_path: Path
) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps="1", torch={"activities": ["cpu"]})
    with capture(1, engines=engine, config=config) as cap:
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    manifest = cap.result.manifest()
    assert manifest is not None
    assert manifest.problems() == []
    assert_works(engine, tmp_path)


def test_a_capture_from_another_event_loop_reaches_the_one_that_owns_the_engine(
    engine: Any, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)

    async def elsewhere() -> list[Artifact]:
        profiler = SglangProfiler(engine)
        await profiler.start(wanted)
        await asyncio.to_thread(on_its_loop, engine, generate(engine, 1, 3))
        return await profiler.stop()

    (artifact,) = asyncio.run(elsewhere())
    assert_complete(artifact, wanted)
    assert_works(engine, tmp_path)


# A stop that takes long.


@pytest.fixture
def scheduler(engine: Any, tmp_path: Path) -> Iterator[int]:
    """Provide the process id of the engine's scheduler, which runs again afterwards."""
    (artifact,) = record(engine, asked(tmp_path / "who"), tokens=2)
    assert artifact.pid is not None
    yield artifact.pid
    os.kill(artifact.pid, signal.SIGCONT)


def test_a_stop_that_is_given_up_is_finished_and_the_engine_can_be_captured_again(
    engine: Any, tmp_path: Path, scheduler: int
) -> None:
    wanted = asked(tmp_path)

    async def scenario() -> None:
        profiler = SglangProfiler(engine)
        await profiler.start(wanted)
        await generate(engine, 1, 3)
        os.kill(scheduler, signal.SIGSTOP)  # does not answer, like a scheduler that writes for minutes
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(profiler.stop(), 0.5)
        assert not sidecars(tmp_path / "step_000001")
        os.kill(scheduler, signal.SIGCONT)
        again = asked(tmp_path, step=2)
        await profiler.start(again)
        assert sidecars(tmp_path)  # the start has waited for the stop that was given up
        await generate(engine, 1, 3)
        (artifact,) = await profiler.stop()
        assert_complete(artifact, again)

    on_its_loop(engine, scenario())
    assert_works(engine, tmp_path)


def test_why_names_a_scheduler_that_stopped(engine: Any, tmp_path: Path, scheduler: int) -> None:
    config = ProfileConfig(
        save_path=tmp_path, record="spans", roles={"*": {"profiler": "off"}}, control={"poll_seconds": 0.1}
    )

    async def rollout() -> None:
        with span("generate", role="rollout"):
            await generate(engine, 1, 3)

    def ask_until_requests_wait() -> Why:
        until = time.monotonic() + 60
        while True:
            states = ask(RunLayout(tmp_path), 10)
            if any(queue.requests == 4 for state in states for queue in state.engines):
                return why(states)
            assert time.monotonic() < until

    async def scenario() -> Why:
        async with capture(0, engines=engine, config=config):
            await rollout()
        os.kill(scheduler, signal.SIGSTOP)
        async with capture(1, engines=engine, config=config), span("step", role="trainer"):
            rollouts = [asyncio.ensure_future(rollout()) for _ in range(4)]
            answer = await asyncio.to_thread(ask_until_requests_wait)
            os.kill(scheduler, signal.SIGCONT)
            await asyncio.gather(*rollouts)
        return answer

    answer = on_its_loop(engine, scenario())
    standing.stop()
    first = answer.calls[answer.culprits[0]]
    assert (first.kind, first.stage) == ("engine", "replica 0")
    assert "engine replica 0, 4 requests" in say_call(first)
    assert len([call for call in answer.calls if call.stage == "generate"]) == 4
    assert_works(engine, tmp_path)


@pytest.mark.parametrize("iterations", [Iterations(), Iterations(count=3)])
def test_a_start_that_is_cancelled_on_its_way_leaves_nothing_armed(
    engine: Any, tmp_path: Path, scheduler: int, iterations: Iterations
) -> None:
    async def scenario() -> None:
        os.kill(scheduler, signal.SIGSTOP)
        profiler = SglangProfiler(engine)
        starting = asyncio.ensure_future(profiler.start(asked(tmp_path, iterations=iterations)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(starting, 0.5)
        os.kill(scheduler, signal.SIGCONT)
        await generate(engine, 1, 5)
        await asyncio.wrap_future(profiler._thread.submit(lambda: None))  # the given-up work runs before this

    on_its_loop(engine, scenario())
    assert_works(engine, tmp_path)


def sidecars(root: Path) -> list[Path]:
    return [path for path in files_below(str(root)) if path.name.endswith(".meta.json")]


def manifest_of(result: CaptureResult) -> Manifest:
    manifest = result.manifest()
    assert manifest is not None
    return manifest


def test_files_of_a_stop_that_missed_its_deadline_are_pending_until_they_come(
    engine: Any, tmp_path: Path, scheduler: int
) -> None:
    config = ProfileConfig(
        save_path=str(tmp_path), steps="1", torch={"activities": ["cpu"]}, budget={"fanout_seconds": 8}
    )

    async def scenario() -> None:
        async with capture(1, engines=engine, config=config) as cap:
            await generate(engine, 1, 3)
            os.kill(scheduler, signal.SIGSTOP)
        (line,) = manifest_of(cap.result).awaited(only="late")
        assert "replica 0: pending: timeout" in line
        os.kill(scheduler, signal.SIGCONT)
        while manifest_of(cap.result).awaited(only="late"):  # noqa: ASYNC110  # nothing tells a program
            await asyncio.sleep(0.05)
        assert manifest_of(cap.result).problems() == []

    on_its_loop(engine, scenario())
    assert_works(engine, tmp_path)


# Stages.


def test_stages_of_a_capture_that_begins_during_decoding_do_no_harm(engine: Any, tmp_path: Path) -> None:
    """SGLang then drops the decode profile in the middle of a pass, without a stop, to start another."""

    async def scenario(step: int) -> list[Artifact]:
        profiler = SglangProfiler(engine)
        running = asyncio.ensure_future(generate(engine, 1, 900))
        await asyncio.sleep(0.2)
        await profiler.start(asked(tmp_path / str(step), by_stage=True, iterations=Iterations(count=20)))
        await generate(engine, 1, 4)
        assert not running.done()
        await running
        return await profiler.stop()

    for step in range(5):
        assert on_its_loop(engine, scenario(step))
    assert_works(engine, tmp_path)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_stage_that_never_came_is_not_left_armed(engine: Any, tmp_path: Path, tokens: int) -> None:
    wanted = asked(tmp_path, by_stage=True, iterations=Iterations(count=5))
    if tokens:
        (artifact,) = record(engine, wanted, tokens=tokens)
        assert artifact.stage == "prefill"
    else:
        assert record(engine, wanted, tokens=tokens) == []
    assert_works(engine, tmp_path)


# Captures that are refused before the engine is called.


def test_a_profile_that_somebody_else_runs_is_left_alone(engine: Any, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"

    async def scenario() -> None:
        manager = engine.tokenizer_manager
        await start_by_hand(manager, output_dir=str(theirs), with_stack=False)
        await generate(engine, 1, 2)
        with pytest.raises(EngineError, match="not for us"):
            await SglangProfiler(engine).start(asked(tmp_path))
        await manager.stop_profile()

    on_its_loop(engine, scenario())
    assert files_below(str(theirs))
    assert_works(engine, tmp_path)


async def start_by_hand(manager: Any, **options: object) -> None:
    if VERSION >= (0, 5, 15):
        from sglang.srt.managers.io_struct import ProfileReq

        await manager.start_profile(ProfileReq(**options))
    else:
        await manager.start_profile(**options)
