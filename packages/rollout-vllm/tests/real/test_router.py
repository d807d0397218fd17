"""Tests of vLLM's real router in front of stand-ins for vLLM 0.32 servers, which note their requests.

`test_vllm_more.py` has two real servers behind the router, which take minutes.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import vllm  # noqa: F401  where it is not installed this file is left out

from stepscope.engines.http import workers_of
from stepscope.errors import EngineError
from stepscope_vllm import VllmServer

ANSWERS: dict[str, object] = {
    "/health": {},
    "/version": {"version": "0.32.0"},
    "/openapi.json": {
        "paths": {"/start_profile": {}},
        "schemas": ["profile_prefix", "delay_iterations", "max_iterations"],
    },
    "/start_profile": {},
    "/stop_profile": {},
}


class Backend(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Backend

    def do_GET(self) -> None:
        body = json.dumps(ANSWERS.get(self.path)).encode()
        self.send_response(200 if self.path in ANSWERS else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.posted.append(self.path)
        self.do_GET()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Backend]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(Backend()) for _ in range(2)]
        for backend in servers:
            threading.Thread(target=backend.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(backend.shutdown)
        yield servers


@pytest.fixture(scope="module")
def router(backends: list[Backend], route: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    # The router lists each server twice, as with data parallelism: http://host:8000@0, http://host:8000@1
    with route([backend.url for backend in backends], "--intra-node-data-parallel-size", "2") as url:
        yield url


def post(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        return int(answer.status)


def test_a_router_reports_success_for_what_one_of_its_servers_did(
    router: str, backends: list[Backend]
) -> None:
    """This is why a router's URL is refused: its answer does not say which server answered."""
    for backend in backends:
        backend.posted.clear()
    assert post(f"{router}/start_profile") == 200
    assert sorted(backend.posted for backend in backends) == [[], ["/start_profile"]]


def test_the_url_of_a_router_is_refused_with_those_of_its_servers(
    router: str, backends: list[Backend], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="is a router") as caught:
        VllmServer(router, tmp_path).check()
    assert all(backend.url in str(caught.value) for backend in backends)
    assert f"VllmServer.behind({router!r}" in str(caught.value)


def test_its_servers_are_named_once_each_and_in_an_order_that_stays(
    router: str, backends: list[Backend]
) -> None:
    assert workers_of(router) == sorted(backend.url for backend in backends)


def test_each_server_behind_it_is_a_replica_that_is_asked_itself(
    router: str, backends: list[Backend], tmp_path: Path
) -> None:
    for replica in VllmServer.behind(router, tmp_path):
        replica.check()


def test_a_server_whose_folder_is_not_among_those_given_is_named(
    router: str, backends: list[Backend]
) -> None:
    first, second = sorted(backend.url for backend in backends)
    with pytest.raises(EngineError, match=f"no folder for {second}"):
        VllmServer.behind(router, {first: "/a/folder"})
