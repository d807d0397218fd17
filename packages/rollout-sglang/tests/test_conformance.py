"""The contract of engine profilers on schedulers in memory, with both signatures of `start_profile`."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from fake_sglang import FakeEngine, FakeManager, OldManager

from stepscope.engines.protocol import EngineProfiler
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler
from stepscope_sglang import SglangProfiler


@pytest.mark.parametrize("kind", [FakeManager, OldManager])
class TestSglangProfiler(EngineConformance):
    honours = frozenset({"iterations", "with_stack", "record_shapes", "by_stage", "merge"})
    any_loop = False

    @pytest.fixture
    def make_profiler(self, kind: type[FakeManager]) -> Iterator[MakeProfiler]:
        processes: list[subprocess.Popen[bytes]] = []

        def make(tmp_path: Path, replica: int) -> EngineProfiler:
            processes.append(subprocess.Popen(["sleep", "1000"]))
            return SglangProfiler(FakeEngine(kind(tp=2), processes[-1:]), replica=replica)

        yield make
        for process in processes:
            process.kill()
            process.wait()

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await _manager(profiler).generate(iterations)

    async def recording(self, profiler: EngineProfiler) -> bool | None:
        return _manager(profiler).recording or _manager(profiler).armed

    async def die(self, profiler: EngineProfiler) -> None:
        _manager(profiler).dead = True
        _engine(profiler).processes[0].kill()

    async def hang_on_start(self, profiler: EngineProfiler) -> None:
        _manager(profiler).silent = "start"

    async def hang_on_stop(self, profiler: EngineProfiler) -> None:
        _manager(profiler).silent = "stop"

    async def repair(self, profiler: EngineProfiler) -> None:
        _manager(profiler).silent = None
        _manager(profiler).answer.set()
        await _at_leisure(profiler)

    async def _assert_idle_and_usable(self, profiler: EngineProfiler, tmp_path: Path) -> None:
        await _at_leisure(profiler)  # a start that was given up is undone in the background
        await super()._assert_idle_and_usable(profiler, tmp_path)


async def _at_leisure(profiler: EngineProfiler) -> None:
    await asyncio.wrap_future(cast(SglangProfiler, profiler)._thread.submit(lambda: None))


def _engine(profiler: EngineProfiler) -> FakeEngine:
    return cast(FakeEngine, cast(SglangProfiler, profiler)._target._engine)


def _manager(profiler: EngineProfiler) -> FakeManager:
    return _engine(profiler).tokenizer_manager
