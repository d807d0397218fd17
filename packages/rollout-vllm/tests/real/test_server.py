"""Tests of `vllm serve`, whose files are recognised by their names, or because they are new."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import msgspec
import pytest
import vllm

from stepscope import ProfileConfig, capture
from stepscope.engines import EngineProfiler, Iterations
from stepscope.engines.supported import numbers
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture
from stepscope_report import step_report
from stepscope_report.timeline import load_step
from stepscope_vllm import VllmServer

Served: TypeAlias = Any
"""`conftest.Served`, which cannot be imported, because test files are not in a package."""
Serve: TypeAlias = Callable[[ProfileConfig, int], AbstractContextManager[Served]]
BOUNDS = numbers(vllm.__version__) >= (0, 32)


@pytest.fixture(scope="module")
def served(serve: Serve, config: ProfileConfig) -> Iterator[Served]:
    with serve(config, 0) as server:
        yield server


class TestConformance(EngineConformance):
    honours: ClassVar[frozenset[str]] = frozenset({"iterations"} if BOUNDS else ())
    side_by_side: ClassVar[bool] = False

    @pytest.fixture
    def make_profiler(self, served: Served) -> MakeProfiler:
        return lambda tmp_path, replica: VllmServer(served.url, served.folder, replica=replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await asyncio.to_thread(SERVED[0].complete, iterations)


SERVED: list[Served] = []


@pytest.fixture(autouse=True)
def known(served: Served) -> None:
    SERVED[:] = [served]


def test_a_loop_captures_two_steps_of_a_server(
    served: Served, config: ProfileConfig, run_folder: Path
) -> None:
    server = VllmServer(served.url, served.folder)
    for step in (1, 2):
        with capture(step, engines=[server], config=config) as cap:
            served.complete()
        cap.result.raise_for_missing()
        (trace,) = (run_folder / f"step_{step:06d}" / "traces").rglob("*.pt.trace.json.gz")
        assert f"step_{step:06d}" in trace.name
        sidecar = json.loads(Path(f"{trace}.meta.json").read_text())
        assert sidecar["artifact"]["rank"] == 0
        assert sidecar["options"]["generation_tokens_at_stop"] >= 4
        if BOUNDS:  # older servers do not pass a capture's name on to their engines
            (passes,) = load_step(run_folder / f"step_{step:06d}").passes
            assert passes.noted.step == step
            assert sum(passes.noted.served.output) == 4
            (request,) = passes.noted.requests.caller_id
            assert str(request).startswith("cmpl-")
            assert not str(request).endswith("-0")  # it is the id that the client gets with the answer
    assert not [name for name in os.listdir(served.folder) if "trace" in name]


@pytest.mark.skipif(not BOUNDS, reason="older servers are not told the names of captures")
def test_the_passes_of_a_server_are_noted_without_its_profiler(
    served: Served, config: ProfileConfig, run_folder: Path
) -> None:
    """The second capture is of an idle server. The third capture shows that the profiler was not left on."""
    roles = {"rollout": {"ranks": "all", "engine": {"profiler": "passes"}}}
    alone = ProfileConfig(save_path=run_folder, steps="0:1000", roles=roles)
    server = VllmServer(served.url, served.folder)
    with capture(930, engines=[server], config=alone) as cap:
        for tokens in (3, 4, 5):
            served.complete(tokens)
    cap.result.raise_for_missing()
    (passes,) = load_step(run_folder / "step_000930").passes
    noted = passes.noted
    assert (len(noted.requests.id), sum(noted.served.output)) == (3, 12)
    assert sum(noted.served.tokens) == 3 * len("hello world") + 12 - 3
    with capture(931, engines=[server], config=alone) as cap:
        pass
    cap.result.raise_for_missing()
    traces = [file for step in (930, 931) for file in (run_folder / f"step_000{step}").rglob("*.pt.trace*")]
    assert [*traces, *served.folder.glob("*930*"), *served.folder.glob("*931*")] == []
    with capture(932, engines=[server], config=config) as cap:
        served.complete()
    cap.result.raise_for_missing()
    assert list((run_folder / "step_000932").rglob("*.pt.trace.json.gz"))


def test_a_server_of_this_host_keeps_its_passes_for_the_flight_recorder(served: Served) -> None:
    server = VllmServer(served.url, served.folder)
    assert server.keep_passes(8)
    began_ns = time.time_ns()
    for tokens in (4, 5):
        served.complete(tokens)
    (file,) = server.kept_passes(began_ns)
    assert (len(file.requests.id), sum(file.served.output)) == (2, 9)
    assert file.requests.caller_id[0] != file.requests.caller_id[1]
    assert str(file.requests.caller_id[0]).startswith("cmpl-")


def test_the_counters_of_a_server_are_what_its_client_counts(served: Served, config: ProfileConfig) -> None:
    with capture(920, engines=[VllmServer(served.url, served.folder)], config=config) as cap:
        for _ in range(3):
            served.complete(tokens=4)
        time.sleep(2.5)  # the server is asked once a second
    assert cap.result.path is not None
    counters = step_report(load_step(cap.result.path)).counters
    assert counters is not None
    rows = {row.name: row for row in counters.rows if row.of == "replica 0"}
    assert rows["finished requests"].increase == 3
    assert rows["generation tokens"].increase == 12
    assert rows["preemptions"].increase == 0
    assert rows["KV cache"].unit == "%"


async def test_what_a_server_was_built_with_is_not_guessed(served: Served, tmp_path: Path) -> None:
    server = VllmServer(served.url, served.folder, replica=0)
    await server.start(msgspec.structs.replace(a_capture(tmp_path), with_stack=True))
    served.complete()
    assert len(await server.stop()) == 1
    assert "not known" in server.ignored["with_stack"]


async def test_iterations_are_honoured_or_the_version_that_would_is_named(
    served: Served, tmp_path: Path
) -> None:
    server = VllmServer(served.url, served.folder, replica=0)
    await server.start(msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(count=2)))
    served.complete(10)
    assert len(await server.stop()) == 1
    assert BOUNDS or "vLLM 0.32.0 has it" in server.ignored["iterations"]


def test_the_key_of_the_api_does_not_guard_the_profiler(served: Served) -> None:
    assert served.post("/start_profile") == 200
    assert served.post("/stop_profile") == 200


@pytest.mark.skipif(not BOUNDS, reason="older servers ignore a second start")
async def test_a_server_that_profiles_already_says_who_can_end_it(served: Served, tmp_path: Path) -> None:
    served.post("/start_profile")
    try:
        with pytest.raises(EngineError, match=r"POST .*/stop_profile"):
            await VllmServer(served.url, served.folder, replica=0).start(a_capture(tmp_path))
    finally:
        served.post("/stop_profile")


def test_a_server_whose_folder_nobody_said_asks_for_it(served: Served) -> None:
    with pytest.raises(EngineError, match="profile_dir="):
        VllmServer(served.url).check()


async def test_a_folder_that_this_host_does_not_see_is_an_error(served: Served, tmp_path: Path) -> None:
    server = VllmServer(served.url, tmp_path / "elsewhere", replica=0)
    await server.start(a_capture(tmp_path))
    served.complete()
    with pytest.raises(EngineError, match=r"trace to .*elsewhere"):
        await server.stop()


async def test_zz_a_server_that_died_is_an_error_at_once(served: Served, tmp_path: Path) -> None:
    server = VllmServer(served.url, served.folder, replica=0)
    await server.start(a_capture(tmp_path))
    os.killpg(served.process.pid, signal.SIGKILL)
    served.process.wait()
    with pytest.raises(EngineError, match=r"no answer|refused"):
        await asyncio.wait_for(server.stop(), 10)
    with pytest.raises(EngineError, match="the server up"):
        server.check()
