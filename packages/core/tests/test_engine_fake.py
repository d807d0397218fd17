"""The fake engine passes the suite that real ones have to pass."""

from __future__ import annotations

from collections.abc import Callable
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

    def recording(self, profiler: EngineProfiler) -> bool:
        return bool(_engine(profiler).recordings)

    def die(self, profiler: EngineProfiler) -> None:
        _engine(profiler).dead = True

    def fail_halfway(self, profiler: EngineProfiler) -> Callable[[], None]:
        return _fault(profiler, "fails_to_start")

    def hang_on_start(self, profiler: EngineProfiler) -> Callable[[], None]:
        return _fault(profiler, "hangs_on_start")

    def hang_on_stop(self, profiler: EngineProfiler) -> Callable[[], None]:
        return _fault(profiler, "hangs_on_stop")


def _engine(profiler: EngineProfiler) -> FakeEngine:
    return cast(FakeEngineProfiler, profiler).engine


def _fault(profiler: EngineProfiler, name: str) -> Callable[[], None]:
    engine = _engine(profiler)
    setattr(engine, name, 1)
    return lambda: setattr(engine, name, None)
