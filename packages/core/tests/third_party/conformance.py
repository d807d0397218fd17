"""The toy adapter passes the suite that every engine adapter has to pass."""

from __future__ import annotations

import pytest
from toy_profiler.engine import ToyEngine, ToyProfiler

from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler


class TestToyEngine(EngineConformance):
    @pytest.fixture
    def make_profiler(self) -> MakeProfiler:
        return lambda tmp_path, replica: ToyProfiler(ToyEngine(), replica)
