"""How often a server is told to stop.

A stand-in for vLLM up to 0.30 with a profiler in its API server, which one stop too many ends in a
segmentation fault; `real/test_server.py` has the real ones.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stepscope.testing.engine_conformance import a_capture
from stepscope_vllm import VllmServer


class OldServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.stops = 0
        folder.mkdir()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def write(self) -> None:
        self.stops += 1
        for name in ("abc-rank-0", "host_7.async_llm"):
            path = self.folder / f"{name}.{self.stops}.pt.trace.json.gz"
            path.write_bytes(gzip.compress(b'{"traceEvents": []}'))


class Handler(BaseHTTPRequestHandler):
    server: OldServer

    def do_GET(self) -> None:
        said = {"/version": {"version": "0.29.0"}, "/openapi.json": {"paths": {"/start_profile": {}}}}
        self._reply(json.dumps(said.get(self.path, {})).encode())

    def do_POST(self) -> None:
        if self.path == "/stop_profile":
            self.server.write()
        self._reply(b"")

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OldServer]:
    with OldServer(tmp_path / "written") as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("somebody_stops_it", [False, True])
async def test_a_server_is_stopped_once_whoever_stops_it(
    server: OldServer, tmp_path: Path, somebody_stops_it: bool
) -> None:
    profiler = VllmServer(server.url, server.folder, replica=0)
    await profiler.start(a_capture(tmp_path))
    if somebody_stops_it:
        await asyncio.to_thread(_post, f"{server.url}/stop_profile")
    found = await profiler.stop()
    assert sorted(artifact.kind for artifact in found) == ["vllm_frontend_trace", "vllm_trace"]
    assert await profiler.stop() == []
    assert server.stops == 1


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
        pass
