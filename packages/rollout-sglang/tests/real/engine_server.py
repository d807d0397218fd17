"""A real server: the contract, the controls, and what it answers. Run by `test_engines.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tiny_sglang import settings, write_model

from stepscope.engines.protocol import EngineProfiler, Iterations
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture, assert_complete
from stepscope_sglang import SglangServer

_UP_S = 240


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = settings(write_model(folder / "model"), host="127.0.0.1", port=port, skip_server_warmup=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *_words(options)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, folder / "log")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _words(options: dict[str, Any]) -> list[str]:
    """As `--max-total-tokens 4096 --sleep-on-idle`."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return [
        word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])
    ]


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # a server has no event for being up
        else:
            return
    raise TimeoutError(log.read_text()[-3000:])


def post(url: str, tokens: int) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


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


async def test_two_servers_of_one_replica_keep_their_files_apart(server: str, tmp_path: Path) -> None:
    # One server under two names: a start on the second finds the first one's profile running.
    profiler = SglangServer(server, server.replace("127.0.0.1", "localhost"))
    await profiler.start(a_capture(tmp_path))
    await asyncio.to_thread(post, server, 3)
    (artifact,) = await profiler.stop()
    assert artifact.rank is None, "nothing says which of the two comes first"
