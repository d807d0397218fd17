"""`vllm serve`, reached by URL alone: files are told apart by their names, or by what was there before."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import pytest
import vllm

import stepscope_vllm
from stepscope import ProfileConfig, capture
from stepscope.engines import EngineProfiler, Iterations
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture
from stepscope_vllm import VllmServer, _versions

BOUNDS = _versions.numbers(vllm.__version__) >= (0, 32)


class Served(NamedTuple):
    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def complete(self, tokens: int = 4) -> None:
        body = {"model": "tiny", "prompt": "hello world", "max_tokens": tokens, "ignore_eos": True}
        self.post("/v1/completions", body, key="secret")

    def post(self, path: str, body: object = None, key: str | None = None) -> int:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)


@pytest.fixture(scope="module")
def served(model: str, config: ProfileConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
    options += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
        "--api-key",
        "secret",
    ]
    arguments = stepscope_vllm.server_args(config, 0)
    log = tmp_path_factory.mktemp("server") / "log"
    module = "vllm.entrypoints.openai.api_server"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--model", model, *options, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    profiler = json.loads(arguments[arguments.index("--profiler-config") + 1])
    found = Served(f"http://127.0.0.1:{port}", Path(profiler["torch_profiler_dir"]), process)
    try:
        _wait_until_healthy(found, log)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(served: Served, log: Path) -> None:
    until = time.monotonic() + 280
    while time.monotonic() < until and served.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{served.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-3000:]}")


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
    assert not [name for name in os.listdir(served.folder) if "trace" in name]


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
        with pytest.raises(EngineError, match=r"curl -X POST .*/stop_profile"):
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
    with pytest.raises(EngineError, match=r"wrote no trace to .*elsewhere.*this folder seen"):
        await server.stop()


async def test_zz_a_server_that_died_is_an_error_at_once(served: Served, tmp_path: Path) -> None:
    server = VllmServer(served.url, served.folder, replica=0)
    await server.start(a_capture(tmp_path))
    os.killpg(served.process.pid, signal.SIGKILL)
    served.process.wait()
    with pytest.raises(EngineError, match=r"no answer|refused"):
        await asyncio.wait_for(server.stop(), 10)
    with pytest.raises(EngineError, match="is the server up"):
        server.check()
