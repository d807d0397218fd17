"""The fake engine passes the suite that real ones have to pass."""

from __future__ import annotations

from typing import cast

import pytest

from stepscope.engines.protocol import EngineProfiler
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


class TestFakeEngine(EngineConformance):
    honours = frozenset({"iterations"})
    quick_s = 1.0

    @pytest.fixture
    def make_profiler(self) -> MakeProfiler:
        return lambda tmp_path, replica: FakeEngineProfiler(FakeEngine(), replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await _engine(profiler).generate(iterations)

    async def recording(self, profiler: EngineProfiler) -> bool:
        return bool(_engine(profiler).recordings)

    async def die(self, profiler: EngineProfiler) -> None:
        _engine(profiler).dead = True

    async def fail_halfway(self, profiler: EngineProfiler) -> None:
        _engine(profiler).fails_to_start = 1

    async def hang_on_start(self, profiler: EngineProfiler) -> None:
        _engine(profiler).hangs_on_start = 1

    async def hang_on_stop(self, profiler: EngineProfiler) -> None:
        _engine(profiler).hangs_on_stop = 1

    async def repair(self, profiler: EngineProfiler) -> None:
        engine = _engine(profiler)
        engine.fails_to_start = engine.hangs_on_start = engine.hangs_on_stop = None


def _engine(profiler: EngineProfiler) -> FakeEngine:
    return cast(FakeEngineProfiler, profiler).engine
