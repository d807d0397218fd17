"""Tests of an AsyncLLM in an async Ray actor whose class does not use stepscope."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import vllm

import stepscope_vllm
from stepscope import ProfileConfig, capture
from stepscope._recording.recorder import standing
from stepscope.engines import EngineCapture
from stepscope.engines.ray import RayRollout
from stepscope.errors import EngineError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest_parts import read_parts
from stepscope.testing.engine_conformance import a_capture
from stepscope_report import step_report
from stepscope_report.timeline import load_step, merge_step

assert vllm


class Rollout:
    """A user's rollout actor."""

    async def build(self, arguments: dict[str, Any]) -> int:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return os.getpid()

    async def generate(self, request: str, tokens: int = 4) -> int:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        count = 0
        async for output in self.llm.generate("hello world", sampling, request):
            count = len(output.outputs[0].token_ids)
        return count

    async def start_somebody_elses(self) -> None:
        await self.llm.start_profile()

    async def stop_somebody_elses(self) -> None:
        await self.llm.stop_profile()

    async def shut_down(self) -> None:
        self.llm.shutdown()


@pytest.fixture(scope="module")
def actor(model: str, sizes: dict[str, Any], config: ProfileConfig) -> Iterator[Any]:
    names = [name for name in os.environ if name.startswith(("VLLM_", "HF_"))]
    environment = {name: os.environ[name] for name in names}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": environment},
        )
        remote: Any = ray.remote
        handle: Any = remote(num_cpus=0, max_concurrency=64)(Rollout).remote()
        try:
            arguments = {"model": model, **sizes, **stepscope_vllm.engine_args(config)}
            ray.get(handle.build.remote(arguments), timeout=280)
            yield handle
            ray.get(handle.shut_down.remote(), timeout=60)
        finally:
            ray.kill(handle)
            ray.shutdown()


def test_a_loop_captures_two_steps_of_an_actors_engine(
    actor: Any, config: ProfileConfig, run_folder: Path
) -> None:
    for step in (1, 2):
        with capture(step, engines=[RayRollout(actor, "vllm")], config=config) as cap:
            counts = ray.get([actor.generate.remote(f"{step}-{number}") for number in range(3)])
        assert counts == [4, 4, 4]
        cap.result.raise_for_missing()
        (trace,) = (run_folder / f"step_{step:06d}" / "traces").rglob("*.pt.trace.json.gz")
        assert f"step_{step:06d}" in trace.name
        assert cap.result.path is not None
        counters = step_report(load_step(cap.result.path)).counters
        assert counters is not None
        grown = {row.name: row.increase for row in counters.rows if row.of == "replica 0"}
        assert (grown["finished requests"], grown["generation tokens"]) == (3, 12)
        (passes,) = load_step(cap.result.path).passes
        assert sorted(map(str, passes.noted.requests.caller_id)) == [
            f"{step}-{number}" for number in range(3)
        ]
        assert sum(passes.noted.served.output) == 12
        merged = merge_step(cap.result.path)
        assert merged.problems == ()
        rollout = [row for row in merged.rows if row.role == "rollout"]  # the actor, and the engine's worker
        assert len({row.native_pid for row in rollout}) == 2
        assert {(row.replica, row.rank) for row in rollout} == {(0, 0)}


def test_the_passes_of_a_step_that_nobody_captured_come_from_the_actor(actor: Any, run_folder: Path) -> None:
    config = ProfileConfig(save_path=run_folder, steps=[1], roles={"rollout": {"ranks": "all"}})
    states, found = list[str](), RunLayout(run_folder).step(10)
    for step in range(10, 40):  # the actor's recorder asks its engine every 2 s
        with capture(step, engines=[RayRollout(actor, "vllm")], config=config):
            assert ray.get([actor.generate.remote(f"{step}-{number}") for number in range(3)]) == [4, 4, 4]
            time.sleep(0.5)
        recorder = standing.standing()
        assert recorder is not None
        assert recorder.write_last(1) == [step]
        assert recorder.drain(60)
        recorder.is_hurried = False
        found = RunLayout(run_folder).step(step)
        until = time.monotonic() + 20
        while not (states := kept_states(found)) and time.monotonic() < until and step > 14:
            time.sleep(0.2)
        if states == ["ok"]:
            break
    assert states == ["ok"]
    (passes,) = load_step(found.root).passes
    assert sorted(map(str, passes.noted.requests.caller_id)) == [f"{step}-{number}" for number in range(3)]
    assert sum(passes.noted.served.output) == 12


def kept_states(layout: StepLayout) -> list[str]:
    parts = read_parts(layout)[0]
    return [item.state for part in parts for item in part.expected if item.name == "replica 0"]


async def test_an_error_of_vllms_own_type_reaches_the_caller_as_text(actor: Any, tmp_path: Path) -> None:
    rollout = RayRollout(actor, "vllm", replica=0)
    await actor.start_somebody_elses.remote()
    try:
        with pytest.raises(EngineError, match="omebody else started"):
            await rollout.start(_capture(tmp_path))
    finally:
        await actor.stop_somebody_elses.remote()


async def test_the_actor_answers_while_its_engine_writes_the_trace(actor: Any, tmp_path: Path) -> None:
    rollout = RayRollout(actor, "vllm", replica=0)
    await rollout.start(_capture(tmp_path, "busy"))
    running = [actor.generate.remote(f"busy-{number}", 60) for number in range(3)]
    artifacts = await rollout.stop()
    assert len(artifacts) == 1
    assert [await answer for answer in running] == [60, 60, 60]


def _capture(root: Path, name: str = "capture") -> EngineCapture:
    return msgspec.structs.replace(a_capture(root, name=name), seconds=60)
