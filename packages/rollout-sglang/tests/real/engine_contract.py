"""Tests of the contract of engine profilers on an engine in this process. Run by `test_engines.py`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from tiny_sglang import generate, on_its_loop

from stepscope.engines.protocol import EngineProfiler
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler
from stepscope_sglang import SglangProfiler

T = TypeVar("T")


class TestSglangProfiler(EngineConformance):
    honours = frozenset({"iterations", "with_stack", "record_shapes", "by_stage", "merge"})
    side_by_side = False  # a second engine would need twice the processes
    any_loop = False

    engine: Any

    @pytest.fixture
    def make_profiler(self, engine: Any) -> MakeProfiler:
        type(self).engine = engine
        return lambda tmp_path, replica: SglangProfiler(engine, replica=replica)

    def run(self, scenario: Coroutine[None, None, T]) -> T:
        return on_its_loop(self.engine, scenario)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await generate(self.engine, 1, iterations)
