"""Servers, over a real socket, with one scheduler in memory behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_sglang import ProfileReq, Scheduler, asked, plugin_state

from packages.core.tests.runs import manifest_of, spans_alone
from stepscope import capture
from stepscope.engines import Iterations
from stepscope.errors import EngineError
from stepscope.files.layout import sidecar_of
from stepscope.files.manifest import IDLE, LATE
from stepscope.files.sidecar import Sidecar
from stepscope.testing.engine_conformance import a_capture, assert_complete, files_below
from stepscope_sglang import SglangServer
from stepscope_sglang._capture import session
from stepscope_sglang._engine_side.states import PROFILE_V2, RPD


class FakeServer(ThreadingHTTPServer):
    """Answers as SGLang's server does: 500 without a reason for whatever goes wrong."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheduler = Scheduler("-TP-0", 0, 1)
        self.info: dict[str, object] = {"version": "0.5.23", "device": "cpu", "sleep_on_idle": True}
        self.info_path = "/server_info"
        self.has_plugin = True
        self.shown: dict[str, object] = {}
        """Deviations of the plugin's answer from this process."""
        self.start_fails: bytes | None = None
        """The body of the 500 of a start that fails."""
        self.stop_status: int | None = None
        """The status of a stop that another party than the server answers."""
        self.behind: list[str] = []
        """The servers that a router names; empty if this is no router."""
        self.key: str | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forward(self, *modes: str) -> None:
        """Run passes of these modes."""
        for mode in modes:
            self.scheduler.forward(mode)

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append(path)
        if path == self.info_path:
            state = plugin_state(self.scheduler.forward_ct, **self.shown) if self.has_plugin else {}
            states = [state]
            return 200, json.dumps({**self.info, "internal_states": states}).encode()
        if path == "/workers" and self.behind:
            return 200, json.dumps({"workers": [{"url": url} for url in self.behind]}).encode()
        if path == "/start_profile":
            if self.start_fails is not None:
                return 500, self.start_fails
            wrong = self.scheduler.start(msgspec.json.decode(body, type=ProfileReq))
        elif path == "/stop_profile":
            if self.stop_status is not None:
                return self.stop_status, b"Gateway Timeout"
            wrong = self.scheduler.stop()
        else:
            return 404, b"Not Found"
        return (200, b"done") if wrong is None else (500, b"Internal Server Error")


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        key = self.server.key
        status, body = 401, b"Unauthorized"
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            length = int(self.headers.get("Content-Length") or 0)
            status, body = self.server.answer(self.path, self.rfile.read(length))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  (the name that http.server looks for)

    def log_message(self, *message: Any) -> None:
        """Print nothing."""


def sidecar(file: Path) -> Sidecar:
    return msgspec.json.decode(sidecar_of(file).read_bytes(), type=Sidecar)


def hidden(root: Path) -> list[Path]:
    """Return the folders that schedulers write to."""
    return list(root.rglob(".sglang-*"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_is_asked_what_it_is(server: FakeServer) -> None:
    server.info.update(tp_size=2, dp_size=2)
    profiler = SglangServer(server.url)
    assert profiler.world_size is None
    profiler.check()
    assert profiler.world_size == 4


def test_an_older_server_is_asked_by_its_older_name(server: FakeServer) -> None:
    server.info_path = "/get_server_info"
    SglangServer(server.url).check()
    assert [server.asked[0], server.asked[-1]] == ["/server_info", "/get_server_info"]


def test_a_server_that_is_too_old_is_an_error(server: FakeServer) -> None:
    server.info["version"] = "0.5.2"
    with pytest.raises(EngineError, match=r"0\.5\.2 .*Fix: pip install"):
        SglangServer(server.url).check()


def test_what_is_no_engine_is_an_error(server: FakeServer) -> None:
    server.info_path = "/elsewhere"
    with pytest.raises(EngineError, match=r"_info answered 404"):
        SglangServer(server.url).check()


def test_a_router_is_refused_by_naming_its_servers(server: FakeServer) -> None:
    # A real router answers in this way in `tests/real/engine_server.py`.
    server.info_path, server.info = "/get_server_info", {"router_manager": True, "workers_count": 2}
    server.behind = ["http://a:1", "http://b:1"]
    message = rf"is a router before http://a:1, http://b:1.*\*SglangServer\.behind\('{server.url}'\)"
    with pytest.raises(EngineError, match=message):
        SglangServer(server.url).check()


def test_a_key_is_asked_for_and_sent(server: FakeServer) -> None:
    server.key = "secret"
    with pytest.raises(EngineError, match=r"answered 401.*api_key="):
        SglangServer(server.url).check()
    SglangServer(server.url, api_key="secret").check()


@pytest.mark.slow
@pytest.mark.parametrize("has_plugin", [True, False])
async def test_stages_are_told_apart_where_the_server_has_the_plugin(
    server: FakeServer, tmp_path: Path, has_plugin: bool
) -> None:
    server.has_plugin = has_plugin
    profiler = SglangServer(server.url)
    await profiler.start(asked(tmp_path, by_stage=True, iterations=Iterations(count=2)))
    server.forward("EXTEND", "DECODE", "DECODE", "DECODE")
    artifacts = await profiler.stop()
    assert [artifact.stage for artifact in artifacts] == (["decode", "prefill"] if has_plugin else [None])
    assert all(("by_stage" in artifact.ignored) is not has_plugin for artifact in artifacts)


async def test_a_stop_that_fails_keeps_what_is_complete_and_the_folder_that_is_written_to(
    server: FakeServer, tmp_path: Path
) -> None:
    profiler = SglangServer(server.url)
    await profiler.start(asked(tmp_path, by_stage=True))
    server.forward("EXTEND", "DECODE")
    server.stop_status = 504  # a proxy in front of the server has timed out
    (artifact,) = await profiler.stop()
    assert artifact.stage == "prefill"
    assert "the stop failed: " in (artifact.truncated or "")
    assert "504" in (artifact.truncated or "")
    assert "that writes later" in profiler.ignored[LATE]
    assert server.scheduler.stop() is None  # the scheduler finds its folder
    session.hand_in_late()  # called at the end of the process
    traces = [path for path in files_below(str(tmp_path)) if ".meta." not in path.name]
    (late,) = (path for path in traces if path.name != Path(artifact.path).name)
    assert sidecar(late).artifact.stage == "decode"
    assert not hidden(tmp_path)


async def test_files_of_a_stop_that_failed_are_published_by_the_next_capture(
    server: FakeServer, tmp_path: Path
) -> None:
    # The rollout alone, or else the capture would also wait for a trace of this process.
    config = spans_alone(tmp_path, steps="1:3", roles={"rollout": {"ranks": "all"}})
    async with capture(1, engines=SglangServer(server.url), config=config) as first:
        server.forward("EXTEND")
        server.stop_status = 504
    (line,) = manifest_of(first.result).awaited(only="late")
    assert "the stop failed" in line
    server.stop_status = None
    async with capture(2, engines=SglangServer(server.url), config=config) as second:
        server.forward("EXTEND")
    for cap in (first, second):
        manifest = manifest_of(cap.result)
        assert manifest.problems() == []
        assert manifest.processes[0].expected[-1].artifacts
    assert not hidden(tmp_path)


async def test_an_engine_that_our_own_failed_stop_left_recording_is_not_blamed_on_somebody(
    server: FakeServer, tmp_path: Path
) -> None:
    profiler = SglangServer(server.url)
    await profiler.start(a_capture(tmp_path))
    server.forward("EXTEND")
    server.stop_status = 504
    with pytest.raises(EngineError, match="the stop failed"):
        await profiler.stop()
    again = r"still runs for step 1: the stop failed: .*504.*; and again: .*504.*Fix: call stop_profile"
    with pytest.raises(EngineError, match=again):
        await SglangServer(server.url).start(msgspec.structs.replace(a_capture(tmp_path), step=2))


async def failed(server: FakeServer, root: Path, step: int, mode: str | None) -> None:
    """Make a capture whose stop fails in a proxy, so that the server records on.

    Args:
        mode: Mode of the pass that runs then; None if the server has stopped and will write no file.
    """
    profiler = SglangServer(server.url)
    await profiler.start(msgspec.structs.replace(a_capture(root), step=step))
    if mode is not None:
        server.forward(mode)
    server.stop_status = 504
    with pytest.raises(EngineError, match="the stop failed"):
        await profiler.stop()
    server.stop_status = None
    if mode is None:
        server.scheduler.start_at = None


async def test_of_several_failed_stops_the_last_one_is_what_the_engine_records(
    server: FakeServer, tmp_path: Path
) -> None:
    await failed(server, tmp_path, 1, None)
    await failed(server, tmp_path, 2, "EXTEND")
    server.stop_status = 504
    with pytest.raises(EngineError, match="for step 2: "):
        await SglangServer(server.url).start(msgspec.structs.replace(a_capture(tmp_path), step=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "shown", "may_be_running"),
    [
        (b"Internal Server Error", "already in progress, or it failed", True),
        (b"Profiling is already in progress. Call /stop_profile first.", "500 Profiling is already", True),
        (b'{"error": "No space left on device"}', "500 .*No space left on device", False),
    ],
)
async def test_a_refused_start_says_what_the_server_said(
    server: FakeServer, tmp_path: Path, body: bytes, shown: str, may_be_running: bool
) -> None:
    server.start_fails = body
    with pytest.raises(EngineError, match=shown) as raised:
        await SglangServer(server.url).start(a_capture(tmp_path))
    assert ("call stop_profile" in str(raised.value)) == may_be_running
    assert ("in progress" in str(raised.value)) == may_be_running


@pytest.mark.parametrize("passes", [0, 5])
async def test_a_decode_server_that_ran_and_recorded_no_stage_is_not_called_idle(
    server: FakeServer, tmp_path: Path, passes: int
) -> None:
    """The server answers a stop with 500 in both cases, as a real server does (`real/engine_decode.py`)."""
    server.info["disaggregation_mode"] = "decode"
    profiler = SglangServer(server.url)
    await profiler.start(msgspec.structs.replace(a_capture(tmp_path), by_stage=True))
    server.scheduler.forward_ct += passes
    if not passes:
        assert await profiler.stop() == []
        assert IDLE in profiler.ignored
        return
    with pytest.raises(EngineError, match=r"5 forward passes.*by_stage: false"):
        await profiler.stop()
    assert IDLE not in profiler.ignored


async def test_a_decode_server_that_refuses_stages_is_told_to_be_recorded_whole(
    server: FakeServer, tmp_path: Path
) -> None:
    server.info["disaggregation_mode"], server.start_fails = "decode", b"Internal Server Error"
    with pytest.raises(EngineError, match=r"500 .*by_stage: false"):
        await SglangServer(server.url).start(msgspec.structs.replace(a_capture(tmp_path), by_stage=True))


async def test_what_somebody_began_after_a_failed_stop_of_ours_goes_on(
    server: FakeServer, tmp_path: Path
) -> None:
    await failed(server, tmp_path, 1, None)
    profiler = SglangServer(server.url)
    await profiler.start(msgspec.structs.replace(a_capture(tmp_path), step=2))
    server.forward("EXTEND")
    assert await profiler.stop()
    server.scheduler.start(ProfileReq(output_dir=str(tmp_path / "somebody")))
    with pytest.raises(EngineError, match=r"500 .*not for us"):
        await profiler.start(msgspec.structs.replace(a_capture(tmp_path), step=3))
    assert server.scheduler.recording is not None


async def test_a_capture_that_was_given_up_and_could_not_be_stopped_is_stopped_by_the_next(
    server: FakeServer, tmp_path: Path
) -> None:
    given_up = SglangServer(server.url)
    await given_up.start(a_capture(tmp_path))
    server.forward("EXTEND")
    server.stop_status = 504
    given_up._thread.submit(given_up._drop).result()  # called if a start was cancelled
    server.stop_status = None
    profiler = SglangServer(server.url)
    await profiler.start(msgspec.structs.replace(a_capture(tmp_path), step=2))
    server.forward("EXTEND")
    (artifact,) = await profiler.stop()
    traces = [path for path in files_below(str(tmp_path)) if ".meta." not in path.name]
    assert [path.name for path in traces] == [Path(artifact.path).name]
    assert not hidden(tmp_path)


def test_a_server_with_the_second_profiler_is_refused_where_it_says_so(server: FakeServer) -> None:
    server.shown = {PROFILE_V2: True}
    with pytest.raises(EngineError, match="SGLANG_PROFILE_V2"):
        SglangServer(server.url).check()


async def test_rpd_is_looked_for_where_the_server_runs(server: FakeServer, tmp_path: Path) -> None:
    server.info["device"] = "cuda"
    wanted = msgspec.structs.replace(a_capture(tmp_path), extra={"activities": "RPD"})
    with pytest.raises(EngineError, match="without rpdTracerControl"):
        await SglangServer(server.url).start(wanted)
    server.shown = {RPD: True}
    await SglangServer(server.url).start(wanted)
    assert server.scheduler.request.activities == ["CPU", "RPD"]


async def test_a_later_start_is_counted_from_what_the_server_shows(
    server: FakeServer, tmp_path: Path
) -> None:
    profiler = SglangServer(server.url)
    wanted = asked(tmp_path, iterations=Iterations(start=1, count=1))
    server.forward(*["DECODE"] * 5)
    await profiler.start(wanted)
    server.forward("EXTEND", "DECODE", "DECODE")
    (artifact,) = await profiler.stop()
    assert_complete(artifact, wanted)
    assert server.scheduler.request.start_step == 7
    assert artifact.truncated is None
    assert "/stop_profile" not in server.asked  # a count ends by itself


async def test_an_idle_server_is_whole_and_nothing_is_left_armed(server: FakeServer, tmp_path: Path) -> None:
    profiler = SglangServer(server.url)
    await profiler.start(a_capture(tmp_path))
    assert await profiler.stop() == []
    assert IDLE in profiler.ignored
    server.forward("EXTEND")
    assert server.scheduler.recording is None


@pytest.mark.slow
async def test_the_servers_of_one_replica_keep_their_files_apart(server: FakeServer, tmp_path: Path) -> None:
    with FakeServer() as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        profiler = SglangServer(server.url, other.url)
        await profiler.start(a_capture(tmp_path))
        for part in (server, other):
            part.scheduler.forward("EXTEND")
        artifacts = await profiler.stop()
        other.shutdown()
    assert len({artifact.path for artifact in artifacts}) == 2
    assert [artifact.rank for artifact in artifacts] == [None, None]


async def test_one_of_two_servers_that_refuses_ends_the_other(server: FakeServer, tmp_path: Path) -> None:
    with FakeServer() as busy:
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        busy.scheduler.recording = []
        with pytest.raises(EngineError, match="not for us"):
            await SglangServer(server.url, busy.url).start(a_capture(tmp_path))
        busy.shutdown()
    server.forward("EXTEND")
    assert server.scheduler.recording is None


async def test_a_server_that_is_gone_is_an_error_at_once(server: FakeServer, tmp_path: Path) -> None:
    profiler = SglangServer(server.url)
    profiler.check()
    server.server_close()
    server.shutdown()
    with pytest.raises(EngineError, match="the server up"):
        await profiler.start(a_capture(tmp_path))
    assert await profiler.stop() == []
