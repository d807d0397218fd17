"""Tests of a real server: the contract of profilers, the options, the answers. Run by `test_engines.py`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec
import pytest
from live_server import Live, live_router, live_server, post

from stepscope import ProfileConfig, capture
from stepscope.engines.http import Server
from stepscope.engines.protocol import EngineProfiler, Iterations
from stepscope.errors import EngineError
from stepscope.files.manifest import IDLE
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture, assert_complete
from stepscope_report import step_report
from stepscope_report.timeline import load_step
from stepscope_sglang import SglangServer, request_facts


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tmp_path_factory.mktemp("server")) as live:
        yield live


@pytest.fixture
def server(live: Live) -> str:
    return live.url


class TestSglangServer(EngineConformance):
    honours = frozenset({"iterations", "with_stack", "record_shapes", "by_stage", "merge"})
    side_by_side = False

    @pytest.fixture
    def make_profiler(self, server: str) -> MakeProfiler:
        return lambda tmp_path, replica: SglangServer(server, replica=replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        url = cast(SglangServer, profiler)._servers[0].url
        await asyncio.to_thread(post, url, iterations)


async def test_a_server_says_what_it_is(server: str) -> None:
    profiler = SglangServer(server)
    assert profiler.world_size is None
    await asyncio.to_thread(profiler.check)
    assert profiler.world_size == 1


def test_the_counters_of_a_server_are_what_its_client_counts(server: str, tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"ranks": "all"}})
    with capture(1, engines=[SglangServer(server)], config=config) as cap:
        time.sleep(4)  # the server is asked once a second, or less often if the machine is busy
        for _ in range(3):
            post(server, 4)
        time.sleep(4)
    assert cap.result.path is not None
    timeline = load_step(cap.result.path)
    (passes,) = timeline.passes
    assert (len(passes.noted.requests.id), sum(passes.noted.served.output)) == (3, 12)
    counters = step_report(timeline).counters
    assert counters is not None
    rows = {row.name: row for row in counters.rows if row.of == "replica 0"}
    assert rows["finished requests"].increase == 3
    assert rows["prompt tokens"].increase == 9
    assert rows["generation tokens"].increase == 12


def test_a_server_of_this_host_keeps_its_passes_for_the_flight_recorder(server: str) -> None:
    profiler = SglangServer(server)
    assert profiler.keep_passes(8)
    began_ns = time.time_ns()
    for tokens in (4, 5):
        post(server, tokens)
    (file,) = profiler.kept_passes(began_ns)
    assert (len(file.requests.id), sum(file.served.output)) == (2, 9)


def test_the_passes_of_a_server_are_noted_without_its_profiler(server: str, tmp_path: Path) -> None:
    """The second capture is of an idle server, and the third shows that no profile is left armed."""
    roles = {"rollout": {"ranks": "all", "engine": {"profiler": "passes"}}}
    alone = ProfileConfig(save_path=tmp_path, steps="0:9", roles=roles)
    with capture(1, engines=[SglangServer(server)], config=alone) as cap:
        for _ in range(3):
            post(server, 4)
    cap.result.raise_for_missing()
    (passes,) = load_step(tmp_path / "step_000001").passes
    assert (len(passes.noted.requests.id), sum(passes.noted.served.output)) == (3, 12)
    assert sum(passes.noted.served.tokens) == 9 + 12 - 3
    with capture(2, engines=[SglangServer(server)], config=alone) as cap:
        pass
    cap.result.raise_for_missing()
    assert not list(tmp_path.rglob("*trace.json*"))
    with capture(
        3, engines=[SglangServer(server)], config=ProfileConfig(save_path=tmp_path, steps="3")
    ) as cap:
        post(server, 4)
    cap.result.raise_for_missing()
    assert list(tmp_path.rglob("*trace.json*"))


@pytest.mark.parametrize(("running", "opens"), [(3, True), (50, False)])
def test_a_servers_window_opens_when_so_many_requests_run(
    server: str, tmp_path: Path, running: int, opens: bool
) -> None:
    window = {"rollout": {"ranks": "all", "engine": {"iterations": {"running": running, "count": 5}}}}
    config = ProfileConfig(save_path=tmp_path, steps="1", roles=window)
    with capture(1, engines=[SglangServer(server)], config=config) as cap, ThreadPoolExecutor(6) as pool:
        until = time.monotonic() + 12  # the server is asked once a second
        while time.monotonic() < until and not list(tmp_path.rglob("*trace.json*")):
            list(pool.map(post, [server] * 6, [100] * 6))
    cap.result.raise_for_missing()
    manifest = cap.result.manifest()
    assert manifest is not None
    (replica,) = (item for part in manifest.processes for item in part.expected if item.kind == "engine")
    assert bool(replica.artifacts) is opens
    assert opens or re.match(
        r"the window never opened: at most [1-8] requests ran at once, 50 ", replica.notes[0]
    )


async def test_sglang_stops_by_itself_after_the_count(server: str, tmp_path: Path) -> None:
    profiler = SglangServer(server)
    wanted = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(count=2))
    await profiler.start(wanted)
    await asyncio.to_thread(post, server, 6)
    (artifact,) = await profiler.stop()
    assert_complete(artifact, wanted)
    assert artifact.truncated is None
    assert artifact.rank == 0


async def test_an_idle_server_is_whole_and_nothing_is_left_armed(server: str, tmp_path: Path) -> None:
    profiler = SglangServer(server)
    await profiler.start(a_capture(tmp_path))
    assert await profiler.stop() == []
    assert IDLE in profiler.ignored
    await asyncio.to_thread(post, server, 3)
    await profiler.start(a_capture(tmp_path, step=2))
    await asyncio.to_thread(post, server, 3)
    assert await profiler.stop()


@pytest.fixture(scope="module")
def router(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_router(tmp_path_factory.mktemp("router"), "--worker-urls", live.url) as router:
        yield router


async def test_a_server_behind_a_router_is_recorded_while_the_router_is_asked(
    router: str, tmp_path: Path
) -> None:
    (profiler,) = await asyncio.to_thread(SglangServer.behind, router)
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, router, 3)
    (artifact,) = await profiler.stop()
    assert_complete(artifact, a_capture(tmp_path))


async def test_the_url_of_a_router_is_refused_by_naming_its_servers(router: str, server: str) -> None:
    with pytest.raises(EngineError, match=f"router before {server}"):
        await asyncio.to_thread(SglangServer(router).check)


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/server_info"])
def test_a_router_passes_no_profiling_on(router: str, path: str) -> None:
    answer = Server(router).request_now("GET" if path == "/server_info" else "POST", path)
    assert answer.status == 404


async def test_an_answer_over_http_says_where_its_time_went(server: str) -> None:
    facts = request_facts(await asyncio.to_thread(post, server, 4))
    assert facts["output_tokens"] == 4
    assert {"request_id", "queued_s", "prefill_s", "decode_s"} <= set(facts)


async def test_a_server_whose_scheduler_dies_fails_its_capture_and_leaves_the_earlier_ones(
    live: Live, tmp_path: Path
) -> None:
    """This test comes last, because it kills the server."""
    profiler = SglangServer(live.url)
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, live.url, 3)
    (artifact,) = await profiler.stop()
    assert artifact.pid is not None
    await profiler.start(a_capture(tmp_path, step=2))
    await asyncio.to_thread(post, live.url, 3)
    os.kill(artifact.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="/stop_profile"):
        await asyncio.wait_for(profiler.stop(), 60)
    assert_complete(artifact, a_capture(tmp_path))
