"""Two servers behind a router. No router of vLLM's runs without its GPU stack: a reverse proxy stands in,
over real HTTP, that spreads requests in turn and names its servers as `vllm-router` does.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import vllm

from stepscope import ProfileConfig, capture
from stepscope.files.sidecar import Sidecar
from stepscope_vllm import VllmServer

assert vllm
Serve: TypeAlias = Callable[[ProfileConfig, int], AbstractContextManager[Any]]


class Proxy(ThreadingHTTPServer):
    """Hands each request to the next server."""

    daemon_threads = True

    def __init__(self, urls: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.urls = urls
        self.turns = cycle(urls)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        if self.path == "/workers":
            self.reply(200, json.dumps({"workers": [{"url": url} for url in self.server.urls]}).encode())
        else:
            self.hand_on(None)

    def do_POST(self) -> None:
        self.hand_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def hand_on(self, body: bytes | None) -> None:
        kept = {
            name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers
        }
        request = urllib.request.Request(
            f"{next(self.server.turns)}{self.path}", body, kept, method=self.command
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            self.reply(answer.status, answer.read())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def router(serve: Serve, config: ProfileConfig) -> Iterator[Proxy]:
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(config, replica)) for replica in (0, 1)]
        proxy = stack.enter_context(Proxy([server.url for server in servers]))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        stack.callback(proxy.shutdown)
        yield proxy


def complete(url: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def test_each_server_behind_a_router_is_a_replica_with_files_of_its_own(
    router: Proxy, config: ProfileConfig, run_folder: Path
) -> None:
    replicas = VllmServer.behind(router.url, run_folder / ".vllm")
    with capture(1, engines=replicas, config=config) as cap:
        for _ in range(4):
            complete(router.url)
    cap.result.raise_for_missing()
    found = [
        msgspec.json.decode(path.read_bytes(), type=Sidecar).artifact
        for path in sorted((run_folder / "step_000001").rglob("*.meta.json"))
    ]
    assert [(each.replica, each.rank) for each in found] == [(0, 0), (1, 1)]
