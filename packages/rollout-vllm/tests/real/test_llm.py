"""Tests of a synchronous LLM in this process, which cover most of the profiler."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import vllm
from vllm import LLM, EngineArgs, SamplingParams

import stepscope_vllm
from stepscope import Capture, ProfileConfig, capture, span
from stepscope.engines import EngineCapture, EngineProfiler, Iterations, load_engine, recognise
from stepscope.errors import EngineError
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.manifest import Expectation
from stepscope.files.passes import KIND as PASSES
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture
from stepscope_report import step_report
from stepscope_report.timeline import load_step
from stepscope_vllm import VllmProfiler, _versions
from stepscope_vllm._capture import session
from stepscope_vllm._capture.session import Desk

MODERN = _versions.dialect_of_engine(LLM).bounds


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM], config: ProfileConfig) -> LLM:
    return make_llm(**stepscope_vllm.engine_args(config, extension=False))


def generate(llm: LLM, tokens: int = 4, requests: int = 2) -> list[Any]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return list(llm.generate(["hello world"] * requests, sampling, use_tqdm=False))


def trace_of(artifact: Artifact, capture_: EngineCapture) -> dict[str, Any]:
    path = Path(capture_.step_dir) / artifact.path
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def iterations_in(trace: dict[str, Any]) -> int:
    return sum(str(event.get("name")).startswith("execute_") for event in trace["traceEvents"])


def test_the_counters_of_a_step_are_what_the_loop_counts(llm: LLM, config: ProfileConfig) -> None:
    generate(llm)  # totals count from the start of the engine, but these tokens are not the step's
    with capture(910, engines=[llm], config=config) as cap:
        outputs = [output for _ in range(3) for output in generate(llm, tokens=5, requests=2)]
    assert cap.result.path is not None
    counters = step_report(load_step(cap.result.path)).counters
    assert counters is not None
    rows = {row.name: row for row in counters.rows if row.of == "replica 0"}
    assert {name: row.increase for name, row in rows.items() if row.increase is not None} == {
        "finished requests": len(outputs),
        "prompt tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "generation tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "preemptions": 0,
    }
    assert rows["running requests"].most <= 2
    assert 0 <= rows["KV cache"].most <= 100
    assert {"waiting requests", "KV cache"} <= rows.keys()


TWO_ENGINES = """
import json, sys
from vllm import LLM, SamplingParams
from stepscope_vllm import VllmProfiler

def totals(engine):
    sources = VllmProfiler(engine).counters()
    sampled = {source.name: sum(source.sample().values()) for source in sources}
    return [sampled["finished requests"], sampled["generation tokens"]]

model, sizes = json.loads(sys.argv[1])
engines = [LLM(model=model, **sizes) for _ in range(2)]
for engine, tokens, requests in zip(engines, (5, 7), (3, 1)):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.generate(["hello world"] * requests, sampling, use_tqdm=False)
print(json.dumps([totals(engine) for engine in engines]))
"""


def test_each_of_two_engines_has_its_own_counters(model: str, sizes: dict[str, Any]) -> None:
    """vLLM removes the first engine's metrics from the process' registry when it makes the second. A process
    of their own, because the end of an engine ends the parallel groups of its process.
    """
    command = [sys.executable, "-c", TWO_ENGINES, json.dumps([model, sizes])]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[3, 15], [1, 7]]


def test_a_step_keeps_the_settings_that_vllm_was_built_with(llm: LLM, config: ProfileConfig) -> None:
    with capture(911, engines=[llm], config=config) as cap:
        generate(llm)
    assert cap.result.path is not None
    manifest = load_step(cap.result.path).manifest
    assert manifest is not None
    (settings,) = (engine for part in manifest.processes for engine in part.settings)
    assert (settings.framework, settings.version, settings.engine) == ("vllm", vllm.__version__, True)
    values = {setting.name: setting.value for setting in settings.settings}
    assert {"max_num_seqs", "enforce_eager"} < set(values) <= set(inspect.signature(EngineArgs).parameters)
    built = llm.llm_engine.vllm_config
    parts = (built.cache_config, built.model_config, built.parallel_config, built.scheduler_config)
    of_parts = {name: [getattr(part, name) for part in parts if hasattr(part, name)] for name in values}
    assert {name: [value] for name, value in values.items()} == of_parts


async def record(llm: LLM, given: EngineCapture, tokens: int = 4) -> tuple[list[Artifact], VllmProfiler]:
    profiler = VllmProfiler(llm, replica=given.replica)
    await profiler.start(given)
    generate(llm, tokens)
    return await profiler.stop(), profiler


class TestConformance(EngineConformance):
    honours: ClassVar[frozenset[str]] = frozenset({"with_stack", "record_shapes", "iterations"})
    side_by_side: ClassVar[bool] = False
    longest_block_s: ClassVar[float] = 1.0

    @pytest.fixture
    def make_profiler(self, llm: LLM) -> MakeProfiler:
        return lambda tmp_path, replica: VllmProfiler(llm, replica=replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        assert isinstance(profiler, VllmProfiler)
        assert isinstance(profiler.engine, LLM)
        generate(profiler.engine, iterations, requests=1)
        await asyncio.sleep(0)

    async def recording(self, profiler: EngineProfiler) -> bool | None:
        assert isinstance(profiler, VllmProfiler)
        assert isinstance(profiler.engine, LLM)
        await session.result_of(session.submit(_idle(profiler._desk)))  # the cancelled start has been undone
        (active,) = profiler.engine.collective_rpc(
            lambda worker: bool(getattr(worker.profiler, "_active", False))
        )
        return bool(active)


async def _idle(desk: Desk) -> None:
    async with desk.turn:
        pass


def test_a_plain_llm_is_recognised_and_found_by_name(llm: LLM) -> None:
    profiler = recognise(llm, 3)
    assert isinstance(profiler, VllmProfiler)
    assert (profiler.replica, profiler.world_size) == (3, 1)
    assert llm in load_engine("vllm").owned()


def replica_of(cap: Capture) -> Expectation:
    manifest = cap.result.manifest()
    assert manifest is not None
    (replica,) = (item for part in manifest.processes for item in part.expected if item.kind == "engine")
    return replica


def rollout(config: ProfileConfig, count: int | None) -> ProfileConfig:
    engine = {"iterations": {"count": count}}
    return ProfileConfig(
        save_path=config.save_path, steps="0:1000", roles={"rollout": {"ranks": "all", "engine": engine}}
    )


def test_fewer_iterations_than_asked_for_are_noted(llm: LLM, config: ProfileConfig) -> None:
    with capture(901, engines=[llm], config=rollout(config, 50)) as cap:
        generate(llm, 9, requests=1)
    replica = replica_of(cap)
    artifact, noted = replica.artifacts
    assert (replica.state, artifact.iterations, artifact.iterations_asked) == ("ok", 9, 50)
    assert noted.iterations == 9  # the notes have the same passes as the trace
    assert replica.notes[0].startswith("9 of 50 ")


@pytest.mark.parametrize("count", [None, 16])
def test_a_recording_that_somebody_else_stops_is_partial_with_numbers(
    llm: LLM, config: ProfileConfig, count: int | None
) -> None:
    with capture(902 if count else 903, engines=[llm], config=rollout(config, count)) as cap:
        generate(llm, 8, requests=1)
        llm.stop_profile()
        generate(llm, 5, requests=1)
    replica = replica_of(cap)
    artifact, noted = replica.artifacts
    assert (replica.state, artifact.iterations, artifact.ended) == ("partial", 8, "others")
    assert noted.iterations == 13
    assert (replica.reason or "").endswith("it ran 5 more")


def test_an_idle_engine_is_whole_and_idle(llm: LLM, config: ProfileConfig) -> None:
    with capture(904, engines=[llm], config=rollout(config, None)) as cap:
        pass
    replica = replica_of(cap)
    assert (replica.state, replica.idle) == ("ok", True)


def test_what_vllm_writes_inside_the_step_is_no_ones_decode(
    llm: LLM, config: ProfileConfig, run_folder: Path
) -> None:
    with capture(905, engines=[llm], config=rollout(config, 4)) as cap, span("generate", role="rollout"):
        generate(llm, 40, requests=1)
    artifact, _ = replica_of(cap).artifacts
    assert artifact.ended == "count"
    (wrote_ns,) = (stall.end_ns - stall.start_ns for stall in artifact.stalls if stall.doing == "writing")
    breakdown = step_report(load_step(RunLayout(run_folder).step(905).root)).breakdown
    assert wrote_ns > 0
    assert abs(breakdown.stalled_ns - wrote_ns) < 50_000_000


def update_weights(worker: object) -> None:
    """Stand in for a framework's method that loads new weights into a worker."""


def test_passes_are_noted_without_the_engines_own_profiler(llm: LLM, run_folder: Path) -> None:
    engine = {"profiler": "passes"}
    alone = ProfileConfig(
        save_path=run_folder, steps="0:1000", roles={"rollout": {"ranks": "all", "engine": engine}}
    )
    for step in (930, 931):
        with capture(step, engines=[llm], config=alone) as cap:
            outputs = generate(llm, tokens=5, requests=3)
            llm.collective_rpc(update_weights)
            outputs += generate(llm, tokens=5, requests=2)
        item = replica_of(cap)
        assert (item.state, item.reason) == ("ok", None)
        (artifact,) = item.artifacts
        assert artifact.kind == PASSES
        (noted,) = load_step(RunLayout(run_folder).step(step).root).passes
        assert sum(noted.noted.served.output) == sum(len(one.outputs[0].token_ids) for one in outputs)
        (updated_ns,) = noted.noted.weights.at_ns
        begun = [begin_ns > updated_ns for begin_ns in noted.noted.passes.begin_ns]
        assert begun == sorted(begun)
        assert sum(begun) == 5, "passes of the second generation"


def test_two_steps_of_a_loop_have_their_own_files_with_what_the_engine_did(
    llm: LLM, config: ProfileConfig, run_folder: Path
) -> None:
    for step in (1, 2):
        with capture(step, engines=[llm], config=config) as cap, span("rollout", role="rollout") as timed:
            (output, _) = generate(llm)
            timed.set(**stepscope_vllm.request_facts(output))
        cap.result.raise_for_missing()
        paths = list((run_folder / f"step_{step:06d}" / "traces" / "rollout").rglob("*.pt.trace.json.gz"))
        assert len(paths) == 1
        sidecar = msgspec.json.decode(sidecar_of(paths[0]).read_bytes(), type=Sidecar)
        assert (sidecar.step, sidecar.artifact.rank, sidecar.artifact.world_size) == (step, 0, 1)
        assert sidecar.options["tensor_parallel_size"] == 1
        assert sidecar.versions["vllm"]
        before, after = (sidecar.options[f"generation_tokens_at_{when}"] for when in ("start", "stop"))
        assert isinstance(before, float)
        assert isinstance(after, float)
        assert after - before == 8
    assert not list(run_folder.rglob("*profiler_out*"))


def test_a_request_says_where_its_time_went(llm: LLM) -> None:
    (output, _) = generate(llm, tokens=5)
    facts = stepscope_vllm.request_facts(output)
    assert (facts["prompt_tokens"], facts["output_tokens"], facts["finish_reason"]) == (11, 5, "length")
    assert float(facts["queued_s"]) >= 0
    assert float(facts["prefill_s"]) > 0
    assert float(facts["decode_s"]) > 0


async def test_the_asked_iterations_are_recorded_and_no_others(llm: LLM, tmp_path: Path) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(start=2, count=3))
    (artifact,), _ = await record(llm, given, tokens=12)
    assert iterations_in(trace_of(artifact, given)) in (3, 4)  # vLLM counts the ends of iterations


async def test_generation_on_the_users_thread_is_in_the_trace(llm: LLM, tmp_path: Path) -> None:
    given = a_capture(tmp_path)
    (artifact,), _ = await record(llm, given)
    trace = trace_of(artifact, given)
    assert iterations_in(trace) >= 4
    assert sum(event.get("cat") == "cpu_op" for event in trace["traceEvents"]) > 100


@pytest.mark.parametrize(
    ("option", "mark"),
    [("record_shapes", '"Input Dims"'), ("with_stack", "python_function")],
)
async def test_an_option_is_of_one_capture_alone(llm: LLM, tmp_path: Path, option: str, mark: str) -> None:
    wanted = msgspec.structs.replace(a_capture(tmp_path, step=1), **{option: True})
    (first,), _ = await record(llm, wanted)
    assert mark in json.dumps(trace_of(first, wanted))
    plain = a_capture(tmp_path, step=2)
    (second,), _ = await record(llm, plain)
    assert mark not in json.dumps(trace_of(second, plain))


@pytest.mark.parametrize(("built", "asked", "counted"), [(True, None, True), (False, True, True)])
async def test_operations_are_counted_as_the_engine_was_built_or_the_capture_says(
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: bool,
    asked: bool | None,
    counted: bool,
) -> None:
    profiler = VllmProfiler(llm, replica=0)
    flops = "torch_profiler_with_flops"
    monkeypatch.setattr(profiler._target.config.profiler_config, flops, built)
    extra = {} if asked is None else {flops: asked}
    await profiler.start(msgspec.structs.replace(a_capture(tmp_path), extra=extra))
    try:
        assert llm.collective_rpc(lambda worker: _worker(worker).profiler.profiler.with_flops) == [counted]
    finally:
        await profiler.stop()


async def test_a_rank_that_nobody_asked_for_writes_nothing(llm: LLM, tmp_path: Path) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path, replica=2), ranks=(2,))
    (artifact,), _ = await record(llm, given)
    assert artifact.rank == 2


async def test_a_recording_that_nobody_ends_ends_by_itself(llm: LLM, tmp_path: Path) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path), seconds=0.05)
    profiler = VllmProfiler(llm, replica=0)
    await profiler.start(given)
    generate(llm)
    session = profiler._desk.current
    assert session is not None
    await asyncio.to_thread(session.over.wait, 30)
    (artifact,) = await profiler.stop()
    assert "0.05 s" in str(artifact.truncated)


async def test_a_folder_that_cannot_be_written_is_an_error_at_start(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "step_000001").write_text("a file where a folder should be")
    profiler = VllmProfiler(llm, replica=0)
    with pytest.raises(EngineError, match=r"(NotADirectoryError|FileExistsError|FileNotFoundError)"):
        await profiler.start(a_capture(tmp_path))
    assert await profiler.stop() == []


async def test_files_that_never_came_are_an_error_though_vllm_reports_success(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_capture(tmp_path)
    profiler = VllmProfiler(llm, replica=0)
    await profiler.start(given)
    generate(llm)
    import torch

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: 1 / 0)
    with pytest.raises(EngineError, match="wrote no trace"):
        await profiler.stop()
    monkeypatch.undo()
    later, _ = await record(llm, a_capture(tmp_path, step=2))
    assert len(later) == 1


async def test_a_profiler_that_somebody_else_started_is_named(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile()
    try:
        with pytest.raises(EngineError, match="omebody else started"):
            await VllmProfiler(llm, replica=0).start(a_capture(tmp_path))
    finally:
        llm.stop_profile()


def test_after_a_capture_the_users_own_profile_goes_where_the_engine_was_told(
    llm: LLM, run_folder: Path, tmp_path: Path
) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path), record_shapes=True)
    asyncio.run(record(llm, given))
    captured, own = set(Path(given.step_dir).rglob("*")), set((run_folder / ".vllm").rglob("*.gz"))
    llm.start_profile()
    generate(llm)
    llm.stop_profile()
    assert set(Path(given.step_dir).rglob("*")) == captured
    (written,) = set((run_folder / ".vllm").rglob("*.gz")) - own
    assert b"Input Dims" not in gzip.decompress(written.read_bytes())


async def test_an_option_of_the_engine_that_differs_is_reported(llm: LLM, tmp_path: Path) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path), extra={"torch_profiler_use_gzip": False})
    _, profiler = await record(llm, given)
    assert "_use_gzip=True" in profiler.ignored["torch_profiler_use_gzip"]


async def test_captures_go_on_after_sleep_and_wake_and_a_cache_reset(llm: LLM, tmp_path: Path) -> None:
    await record(llm, a_capture(tmp_path, step=1))
    llm.sleep(1)  # vLLM's scheduler sleeps; a worker on a CPU ignores the call
    llm.wake_up()
    llm.reset_prefix_cache()
    llm.collective_rpc("reload_weights")
    later, _ = await record(llm, a_capture(tmp_path, step=2))
    assert len(later) == 1


async def test_an_engine_under_nsys_opens_a_range_and_says_who_writes_the_report(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are vLLM's own; only the calls of CUDA are replaced, because there is no GPU."""
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    monkeypatch.setattr("torch.cuda.nvtx.range", lambda name: nullcontext())
    profiler = VllmProfiler(llm, replica=0)
    monkeypatch.setattr(profiler._target.config.profiler_config, "profiler", "cuda")
    own = llm.collective_rpc(_open_ranges)
    try:
        with pytest.raises(EngineError, match="start this process"):
            profiler.check()
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        profiler.check()
        await profiler.start(msgspec.structs.replace(a_capture(tmp_path), with_stack=True))
        generate(llm)
        assert await profiler.stop() == []
    finally:
        llm.collective_rpc(lambda worker: setattr(_worker(worker), "profiler", own[0]))
    assert calls == ["start", "stop"]
    assert "was started with" in profiler.ignored["with_stack"]
    assert "the nsys session" in profiler.ignored["artifacts"]


def _worker(worker: Any) -> Any:
    return getattr(worker, "worker", worker)


def _open_ranges(worker: Any) -> object:
    """Replace the worker's profiler by vLLM's profiler for CUDA ranges. Return the old profiler."""
    from vllm.profiler.wrapper import CudaProfilerWrapper

    worker = _worker(worker)
    had = worker.profiler
    worker.profiler = CudaProfilerWrapper(worker.vllm_config.profiler_config)
    return had


def test_a_run_that_captures_nothing_leaves_nothing(llm: LLM, tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path / "run", steps=[5])
    with capture(1, engines=[llm], config=config):
        generate(llm)
    assert not RunLayout(tmp_path / "run").steps()
