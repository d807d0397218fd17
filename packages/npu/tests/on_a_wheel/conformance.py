"""The conformance tests of backends, on the torch_npu of one wheel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.npu.tests.on_a_wheel.unpacked import Compiled
from stepscope.backends import Backend
from stepscope.config import ProfileConfig
from stepscope.testing.backend_conformance import BackendConformance, MakeBackend
from stepscope_npu._backend import NpuBackend


class TestNpuBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self, compiled: Compiled, tmp_path: Path) -> MakeBackend:
        self.compiled = compiled
        return lambda: NpuBackend(ProfileConfig(tool="npu", save_path=str(tmp_path.parent / "run")))

    def stages_in(self, path: Path) -> set[str]:
        [ranges] = path.glob("PROF_*/host/ranges.json")
        return {one["message"].removeprefix("actor.") for one in json.loads(ranges.read_text())}

    def fail_halfway(self, backend: Backend) -> Callable[[], None]:
        self.compiled.fails["_start_profiler"] = "CANN is not in the mood"
        return self.compiled.fails.clear
