"""Two data-parallel schedulers of one engine. Run by `test_engines.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang
from tiny_sglang import generate, on_its_loop, settings, write_model

from stepscope.engines.protocol import Iterations
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import a_capture, assert_complete
from stepscope_sglang import SglangProfiler

os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # a CPU for each rank; without it they look for NUMA nodes


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = sglang.Engine(**settings(write_model(tmp_path_factory.mktemp("model")), dp_size=2))
    yield engine
    engine.shutdown()


def record(
    engine: Any, tmp_path: Path, requests: int, **changes: Any
) -> tuple[list[Artifact], dict[str, str]]:
    async def scenario() -> tuple[list[Artifact], dict[str, str]]:
        profiler = SglangProfiler(engine, replica=1)
        await profiler.start(msgspec.structs.replace(a_capture(tmp_path, replica=1), **changes))
        if requests:
            await generate(engine, requests, 4)
        return await profiler.stop(), dict(profiler.ignored)

    return on_its_loop(engine, scenario())


def test_each_rank_has_its_file_and_its_global_rank(engine: Any, tmp_path: Path) -> None:
    artifacts, ignored = record(engine, tmp_path, 4)
    assert sorted((each.rank, (each.topology or {})["dp"]) for each in artifacts) == [(2, 0), (3, 1)]
    assert SglangProfiler(engine).world_size == 2
    assert not ignored
    for artifact in artifacts:
        assert_complete(artifact, a_capture(tmp_path, replica=1))


def test_only_the_rank_that_was_asked_for_leaves_a_file(engine: Any, tmp_path: Path) -> None:
    artifacts, _ = record(engine, tmp_path, 4, ranks=(3,))
    assert [each.rank for each in artifacts] == [3]


def test_a_rank_without_requests_is_named_and_not_left_armed(engine: Any, tmp_path: Path) -> None:
    artifacts, ignored = record(engine, tmp_path, 1)
    assert len(artifacts) == 1
    assert "1 of 2 ranks left a file" in ignored["files"]
    artifacts, _ = record(engine, tmp_path / "next", 4, iterations=Iterations(count=1))
    assert len(artifacts) == 2


def test_merging_is_left_to_us(engine: Any, tmp_path: Path) -> None:
    artifacts, ignored = record(engine, tmp_path, 4, merge=True)
    assert {each.kind for each in artifacts} == {"torch_trace"}
    assert "before the other dp and pp ranks" in ignored["merge"]
