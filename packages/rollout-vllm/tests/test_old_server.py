"""Tests with a stand-in for `vllm serve` up to 0.30, whose file names do not contain the capture's name. The
real servers are in `real/test_server.py`.

The API server of such a version has a profiler too, so a second stop crashes it with a segmentation fault.
The cases on ranks and names follow verl's tests/utils/test_server_profiler.py (0f9d0f96).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope.files.layout import RunLayout
from stepscope.testing.engine_conformance import a_capture
from stepscope_report.timeline import merge_step
from stepscope_vllm import VllmServer

EMPTY: dict[str, Any] = {"traceEvents": []}


class OldServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.stops = 0
        self.files = {"abc-rank-0": EMPTY, "host_7.async_llm": EMPTY}
        """{name: trace} for the files that each stop writes."""
        folder.mkdir()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def write(self) -> None:
        self.stops += 1
        for name, trace in self.files.items():
            path = self.folder / f"{name}.{self.stops}.pt.trace.json.gz"
            path.write_bytes(gzip.compress(json.dumps(trace).encode()))


class Handler(BaseHTTPRequestHandler):
    server: OldServer

    def do_GET(self) -> None:
        answers = {"/version": {"version": "0.29.0"}, "/openapi.json": {"paths": {"/start_profile": {}}}}
        self._reply(json.dumps(answers.get(self.path, {})).encode())

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
    artifacts = await profiler.stop()
    assert sorted(artifact.kind for artifact in artifacts) == ["vllm_frontend_trace", "vllm_trace"]
    assert await profiler.stop() == []
    assert server.stops == 1


async def recorded(
    server: OldServer,
    tmp_path: Path,
    replica: int,
    ranks: tuple[int, ...] | None,
    tensor_parallel_size: int = 1,
) -> tuple[dict[str, int | None], VllmServer]:
    """Make a capture. Return {name that vLLM gave a file: the file's global rank}, and the profiler."""
    profiler = VllmServer(
        server.url, server.folder, replica=replica, tensor_parallel_size=tensor_parallel_size
    )
    given = msgspec.structs.replace(a_capture(tmp_path, replica=replica), ranks=ranks)
    await profiler.start(given)
    artifacts = await profiler.stop()
    names = [
        Path(artifact.path).name.removeprefix("capture-step1_").partition(".")[0] for artifact in artifacts
    ]
    return dict(zip(names, (artifact.rank for artifact in artifacts), strict=True)), profiler


SAID = {"distributedInfo": {"rank": 1, "world_size": 2}, **EMPTY}


@pytest.mark.parametrize(
    ("files", "replica", "asked", "tensor_parallel_size", "ranks"),
    [
        ({"rank0": EMPTY, "rank1": EMPTY}, 0, (0, 8), 2, {"rank0": 0}),
        ({"rank0": EMPTY, "rank1": EMPTY}, 4, (0, 8), 2, {"rank0": 8}),
        ({"inst9-rank-0": EMPTY, "inst9-rank-1": EMPTY}, 0, (0, 8), 2, {"inst9-rank-0": 0}),
        ({"inst9-rank-0": EMPTY, "inst9-rank-1": EMPTY}, 4, (0, 8), 2, {"inst9-rank-0": 8}),
        ({"rank0": EMPTY, "rank1": EMPTY}, 4, None, 2, {"rank0": 8, "rank1": 9}),
        ({"rank0": EMPTY}, 8, None, 1, {"rank0": 8}),
        ({"host_12345": EMPTY}, 0, (0,), 2, {"host_12345": None}),  # a file of unknown rank is kept
        ({"rank0": SAID}, 4, None, 2, {"rank0": 9}),  # the rank in the content counts, not that in the name
        ({"rank9": EMPTY}, 3, None, 1, {"rank9": None}),  # an engine of one worker has no rank 9
        ({"rank9": SAID}, 3, None, 1, {"rank9": None}),
    ],
)
async def test_global_ranks_are_those_of_files_and_none_is_made_up(
    server: OldServer, tmp_path: Path, files: dict[str, dict[str, Any]], replica: int,
    asked: tuple[int, ...] | None, tensor_parallel_size: int, ranks: dict[str, int | None],
) -> None:  # fmt: skip
    server.files = files
    found, profiler = await recorded(server, tmp_path, replica, asked, tensor_parallel_size)
    assert found == ranks
    assert ("tensor_parallel_size=" in profiler.ignored.get("ranks", "")) == ("rank9" in files)


async def test_of_a_pipeline_the_log_says_once_what_its_server_needs(
    server: OldServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        VllmServer(server.url, server.folder, pipeline_parallel_size=2).check()
    [record] = caplog.records
    assert "stepscope-rollout-vllm" in record.getMessage()


def test_the_frontends_trace_stands_above_its_workers_on_the_rows_of_their_replica(
    server: OldServer, tmp_path: Path
) -> None:
    base_ns = time.time_ns()

    def trace(pid: int, what: str) -> dict[str, Any]:
        event = {"ph": "X", "name": what, "cat": "cpu_op", "pid": pid, "tid": pid, "ts": 2.5, "dur": 10.0}
        return {"baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms", "traceEvents": [event]}

    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"ranks": "all"}})
    profiler = VllmServer(server.url, server.folder, tensor_parallel_size=2)
    with capture(1, engines=[profiler], config=config) as cap:
        server.files = {
            "inst-rank-1": trace(8, "a kernel of worker 1"),
            "inst-rank-0": trace(7, "a kernel of worker 0"),
            "host_6.async_llm": trace(6, "schedule"),
        }
    cap.result.raise_for_missing()
    step = RunLayout(tmp_path).step(1)
    merged = merge_step(step.root)
    events = json.loads(gzip.decompress(step.timeline.read_bytes()))["traceEvents"]
    placed = {event["pid"]: event for event in events if event.get("cat") == "cpu_op"}
    shown = [(row.name, placed[row.pid]) for row in merged.rows if row.pid in placed]
    assert [(row, event["name"]) for row, event in shown] == [
        ("rollout replica 0", "schedule"),
        ("rollout 0", "a kernel of worker 0"),
        ("rollout 1", "a kernel of worker 1"),
    ]
    assert {merged.base_ns + round(event["ts"] * 1000) for _, event in shown} == {base_ns + 2500}


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
        pass
