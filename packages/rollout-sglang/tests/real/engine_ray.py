"""Tests of an engine in a Ray actor whose class does not use stepscope. Run by `test_engines.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from tiny_sglang import generate, limit_memory, settings, write_model

from stepscope import ProfileConfig, capture
from stepscope.engines.protocol import Iterations
from stepscope.engines.ray import RayRollout
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import a_capture, assert_complete
from stepscope_report.timeline import load_step, merge_step


class Rollout:
    """An async actor that holds the engine, as in RL frameworks."""

    def __init__(self, model: str) -> None:
        import sglang

        limit_memory()
        self.engine = sglang.Engine(**settings(Path(model)))

    async def generate(self, tokens: int) -> int:
        return len(await generate(self.engine, 1, tokens))

    async def close(self) -> None:
        self.engine.shutdown()


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_path()])}},
    )
    handle: Any = (
        ray.remote(Rollout).options(num_cpus=0).remote(str(write_model(tmp_path_factory.mktemp("m"))))
    )
    ray.get(handle.generate.remote(1), timeout=300)
    yield handle
    ray.get(handle.close.remote(), timeout=60)
    ray.shutdown()


def _path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


async def test_an_engine_in_an_actor_is_recorded(actor: Any, tmp_path: Path) -> None:
    replica = RayRollout(actor, "sglang")
    wanted = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(count=3))
    await replica.start(wanted)
    await actor.generate.remote(6)
    (artifact,) = await replica.stop()
    assert_complete(artifact, wanted)
    assert artifact.rank == 0


async def test_a_start_that_is_refused_reaches_the_caller_as_text(actor: Any, tmp_path: Path) -> None:
    replica = RayRollout(actor, "sglang")
    with pytest.raises(EngineError, match="runs on cpu"):
        await replica.start(msgspec.structs.replace(a_capture(tmp_path), activities=("cuda",)))


async def test_a_captured_step_holds_the_replicas_trace_and_its_actors_spans(
    actor: Any, tmp_path: Path
) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps="1", torch={"activities": ["cpu"]})
    async with capture(1, engines=[RayRollout(actor, "sglang")], config=config) as cap:
        await actor.generate.remote(4)
    assert cap.result.problems() == []
    (trace,) = (tmp_path / "step_000001" / "traces" / "rollout" / "replica0").glob("*.trace.json.gz")
    assert trace.stat().st_size > 1000
    assert cap.result.path is not None
    (passes,) = load_step(cap.result.path).passes
    assert (passes.replica, sum(passes.noted.served.output)) == (0, 4)
    merged = merge_step(cap.result.path)
    assert merged.problems == ()
    assert len({row.native_pid for row in merged.rows if row.role == "rollout"}) == 2
