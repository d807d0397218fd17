"""Tests of engines with two schedulers: data, tensor and pipeline parallel. Run by `test_engines.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang
from tiny_sglang import MODEL, SPLIT, generate, on_its_loop, settings, write_model

from stepscope.engines.protocol import Iterations
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import a_capture, assert_complete
from stepscope_sglang import SglangProfiler

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "data": (MODEL, {"dp_size": 2}),
    "tensor": (SPLIT, {"tp_size": 2}),
    "pipeline": (SPLIT, {"pp_size": 2}),
}
data, tensor, pipeline = (pytest.mark.parametrize("parallel", [name], indirect=True) for name in LAYOUTS)


@pytest.fixture(scope="module")
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model, sizes = LAYOUTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang needs it if there is one NUMA node
        folder = write_model(tmp_path_factory.mktemp("model"), model)
        # Metrics are off, because those of a second engine in this process would have the same names.
        engine = sglang.Engine(**settings(folder, enable_metrics=False, **sizes))
    yield engine
    engine.shutdown()


def record(engine: Any, tmp_path: Path, *, requests: int, step: int = 1, **changes: Any) -> list[Artifact]:
    wanted = msgspec.structs.replace(a_capture(tmp_path, step=step), **changes)

    async def scenario() -> list[Artifact]:
        profiler = SglangProfiler(engine)
        assert profiler.world_size == 2
        await profiler.start(wanted)
        await generate(engine, requests, 4)
        artifacts = await profiler.stop()
        for artifact in artifacts:
            assert_complete(artifact, wanted)
        return artifacts

    return on_its_loop(engine, scenario())


def passes(engine: Any) -> list[int]:
    return [
        state["forward_ct"] for state in on_its_loop(engine, engine.tokenizer_manager.get_internal_state())
    ]


@data
def test_each_data_parallel_rank_leaves_a_file_and_has_a_global_rank(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=4)
    assert {artifact.rank: artifact.topology for artifact in artifacts} == {
        0: {"tp": 0, "dp": 0},
        1: {"tp": 0, "dp": 1},
    }


@data
def test_only_the_ranks_that_were_asked_for_are_kept(parallel: Any, tmp_path: Path) -> None:
    (artifact,) = record(parallel, tmp_path, requests=4, ranks=(1,))
    assert artifact.rank == 1


@data
def test_a_rank_without_a_request_is_named_and_not_left_armed(parallel: Any, tmp_path: Path) -> None:
    (artifact,) = record(parallel, tmp_path, requests=1, iterations=Iterations(count=2))
    assert artifact.ignored["files"].startswith("1 of 2 ranks")
    both = record(parallel, tmp_path, requests=4, step=2)
    assert {artifact.rank for artifact in both} == {0, 1}


@data
def test_merging_of_data_parallel_ranks_is_left_to_us(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=4, merge=True)
    assert {artifact.kind for artifact in artifacts} == {"torch_trace"}
    assert all("dp and pp" in artifact.ignored["merge"] for artifact in artifacts)


@data
def test_a_later_start_is_refused_where_the_ranks_have_not_run_alike(parallel: Any, tmp_path: Path) -> None:
    while len(set(passes(parallel))) == 1:
        on_its_loop(parallel, generate(parallel, 1, 2))  # a request runs on one rank only
    with pytest.raises(EngineError, match="one number for"):
        record(parallel, tmp_path, requests=1, step=2, iterations=Iterations(start=1))


@tensor
def test_each_tensor_parallel_rank_leaves_a_file_and_has_a_global_rank(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=2)
    assert {artifact.rank: artifact.topology for artifact in artifacts} == {0: {"tp": 0}, 1: {"tp": 1}}


@tensor
def test_ranks_are_those_of_the_run_and_not_of_the_replica(parallel: Any, tmp_path: Path) -> None:
    (artifact,) = record(parallel, tmp_path, requests=2, replica=3, ranks=(0, 7))
    assert (artifact.rank, artifact.topology) == (7, {"tp": 1})


@tensor
def test_the_merge_of_tensor_parallel_ranks_stands_beside_their_files(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=2, merge=True)
    assert sorted(artifact.kind for artifact in artifacts) == ["merged_trace", "torch_trace", "torch_trace"]


@tensor
def test_every_tensor_parallel_rank_leaves_out_the_same_passes(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=1, iterations=Iterations(start=2, count=1))
    assert [artifact.truncated for artifact in artifacts] == [None, None]


@pipeline
def test_each_pipeline_rank_leaves_a_file_and_has_a_global_rank(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=2)
    assert {artifact.rank: artifact.topology for artifact in artifacts} == {
        0: {"tp": 0, "pp": 0},
        1: {"tp": 0, "pp": 1},
    }


@pipeline
def test_pipeline_ranks_survive_captures_in_a_row_by_stage_and_whole(parallel: Any, tmp_path: Path) -> None:
    """Keep sends under way at the end of a stage's profile, and between two captures."""
    for step in range(8):
        whole = record(parallel, tmp_path, requests=2, step=2 * step)
        assert {artifact.rank for artifact in whole} == {0, 1}
        staged = record(
            parallel, tmp_path, requests=2, step=2 * step + 1, by_stage=True, iterations=Iterations(count=2)
        )
        assert {(artifact.rank, artifact.stage) for artifact in staged} == {
            (rank, stage) for rank in (0, 1) for stage in ("prefill", "decode")
        }


@pipeline
def test_merging_of_pipeline_ranks_is_left_to_us(parallel: Any, tmp_path: Path) -> None:
    artifacts = record(parallel, tmp_path, requests=2, merge=True, iterations=Iterations(count=2))
    assert {artifact.kind for artifact in artifacts} == {"torch_trace"}
    assert all("dp and pp" in artifact.ignored["merge"] for artifact in artifacts)
