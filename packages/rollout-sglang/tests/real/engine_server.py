"""A real server: the contract, the controls, and what it answers. Run by `test_engines.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import msgspec
import pytest
from live_server import Live, live_server, post

from stepscope.engines.protocol import EngineProfiler, Iterations
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture, assert_complete
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


async def test_sglang_stops_by_itself_after_the_count(server: str, tmp_path: Path) -> None:
    profiler = SglangServer(server)
    wanted = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(count=2))
    await profiler.start(wanted)
    await asyncio.to_thread(post, server, 6)
    (artifact,) = await profiler.stop()
    assert_complete(artifact, wanted)
    assert artifact.truncated is None
    assert artifact.rank == 0


async def test_a_capture_without_a_forward_pass_leaves_nothing_armed(server: str, tmp_path: Path) -> None:
    profiler = SglangServer(server)
    await profiler.start(a_capture(tmp_path))
    with pytest.raises(EngineError, match="no forward pass"):
        await profiler.stop()
    await asyncio.to_thread(post, server, 3)
    await profiler.start(a_capture(tmp_path, step=2))
    await asyncio.to_thread(post, server, 3)
    assert await profiler.stop()


class Router(ThreadingHTTPServer):
    """Stands in for sglang_router: a reverse proxy that names its servers and passes no profiling on."""

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), Proxy)
        self.server = server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Proxy(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        known = self.path == "/workers"
        self.answer(200 if known else 404, json.dumps({"workers": [{"url": self.server.server}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/generate":
            kind = {"Content-Type": "application/json"}
            passed = urllib.request.Request(f"{self.server.server}/generate", body, kind)
            with urllib.request.urlopen(passed, timeout=60) as reply:
                self.answer(200, reply.read())
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *message: object) -> None:
        """Prints nothing."""


@pytest.fixture
def router(server: str) -> Iterator[str]:
    with Router(server) as router:
        thread = threading.Thread(target=router.serve_forever, daemon=True)
        thread.start()
        yield router.url
        router.shutdown()
        thread.join()


async def test_a_server_behind_a_router_is_recorded_while_the_router_is_asked(
    router: str, tmp_path: Path
) -> None:
    (profiler,) = await asyncio.to_thread(SglangServer.behind, router)
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, router, 3)
    (artifact,) = await profiler.stop()
    assert_complete(artifact, a_capture(tmp_path))


async def test_the_url_of_a_router_is_no_servers(router: str) -> None:
    with pytest.raises(EngineError, match="behind"):
        await asyncio.to_thread(SglangServer(router).check)


async def test_an_answer_over_http_says_where_its_time_went(server: str) -> None:
    facts = request_facts(await asyncio.to_thread(post, server, 4))
    assert facts["output_tokens"] == 4
    assert {"request_id", "queued_s", "prefill_s", "decode_s"} <= set(facts)


async def test_two_servers_of_one_replica_keep_their_files_apart(server: str, tmp_path: Path) -> None:
    # One server under two names: a start on the second finds the first one's profile running.
    profiler = SglangServer(server, server.replace("127.0.0.1", "localhost"))
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, server, 3)
    (artifact,) = await profiler.stop()
    assert artifact.rank is None, "nothing says which of the two comes first"


async def test_a_server_that_dies_fails_its_capture_at_once(live: Live, tmp_path: Path) -> None:
    """The last one: nobody starts it again."""
    profiler = SglangServer(live.url)
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, live.url, 3)
    os.killpg(live.group, signal.SIGKILL)
    with pytest.raises(EngineError, match="/stop_profile: "):
        await asyncio.wait_for(profiler.stop(), 30)
