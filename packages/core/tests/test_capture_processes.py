"""A capture and the life of its process: killed, terminated, exiting, forking, spawning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.process.identity import run_id
from stepscope.errors import MissingArtifactsError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.spans import End, Line, Open, Span
from stepscope.files.storage import write_new

PRELUDE = """
import os, sys, signal, time
from stepscope import ProfileConfig, capture, span
config = ProfileConfig(save_path=sys.argv[1], steps="every:1", roles={"rollout": {"profiler": "off"}})
"""
TORCH = """
import torch
config = ProfileConfig(save_path=sys.argv[1], steps="every:1")
def work():
    with span("work"):
        for _ in range(10):
            torch.ones(8).sum()
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "STEPSCOPE_RAISE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def run(code: str, folder: Path, expected: int = 0) -> str:
    process = start(code, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == expected, err
    return out + err


def step(folder: Path, number: int = 1) -> StepLayout:
    return RunLayout(folder / "run").step(number)


def lines(folder: Path, number: int = 1) -> list[Line]:
    (path,) = step(folder, number).spans.glob("*.jsonl")
    return msgspec.json.Decoder(Line).decode_lines(path.read_bytes())


def parts(folder: Path, number: int = 1) -> list[ProcessPart]:
    return read_parts(step(folder, number))[0]


def states(part: ProcessPart) -> dict[str, str]:
    return {item.name: item.state for item in part.expected}


def manifest(folder: Path, number: int = 1) -> Manifest:
    return fold(parts(folder, number))


def test_a_killed_process_leaves_its_spans_and_the_truth(tmp_path: Path) -> None:
    process = start(
        """
cap = capture(1, config=config).open()
with span("done"):
    pass
with span("hang"):
    time.sleep(1.5)  # an open span has its line after a second, and two flushes
    print("ready", flush=True)
    time.sleep(60)
""",
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    written = lines(tmp_path)
    assert [line.stage for line in written if isinstance(line, Span)] == ["done"]
    assert [line.stage for line in written if type(line) is Open] == ["hang"]
    assert not any(isinstance(line, End) for line in written)
    (part,) = parts(tmp_path)
    assert part.closed is None
    assert manifest(tmp_path).state == "missing"
    run("with capture(2, config=config): pass", tmp_path)
    assert manifest(tmp_path, 2).state == "ok"


@pytest.mark.parametrize(
    ("handler", "code"),
    [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7)],
    ids=["default", "the user's"],
)
def test_sigterm_closes_the_capture_and_then_does_what_it_did(
    tmp_path: Path, handler: str, code: int
) -> None:
    run(
        f"""
{handler}
cap = capture(1, config=config).open()
with span("update"):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
""",
        tmp_path,
        expected=code,
    )
    (part,) = parts(tmp_path)
    assert part.closed is not None
    assert "SIGTERM" in str(part.error)
    assert isinstance(lines(tmp_path)[-1], End)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise ValueError('mine')", 1), ("sys.exit(3)", 3)],
    ids=["end", "error", "exit"],
)
def test_the_interpreters_exit_closes_the_capture(tmp_path: Path, ending: str, code: int) -> None:
    run(f"capture(1, config=config).open()\n{ending}", tmp_path, expected=code)
    (part,) = parts(tmp_path)
    assert part.error == "the process exited"
    assert manifest(tmp_path).state == "ok"


OPENING = """
import asyncio
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
class Slow(FakeEngineProfiler):
    async def start(self, capture):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)  # what stops it meanwhile comes too soon
        await super().start(capture)
engine = FakeEngine()
with capture(0, config=config):  # from now on the process hears SIGTERM
    pass
cap = capture(1, engines=[Slow(engine)], config=config)
"""


def test_sigterm_while_a_capture_opens_says_that_nothing_was_recorded(tmp_path: Path) -> None:
    run(OPENING + "cap.open()", tmp_path, expected=-signal.SIGTERM)
    (part,) = parts(tmp_path)
    assert states(part)["spans"] == "skipped"
    assert not step(tmp_path).spans.exists()
    assert "SIGTERM" in str(part.error)


ASYNCHRONOUS = """
async def main():
    async with cap:
        pass
asyncio.run(main())
"""


@pytest.mark.parametrize("opening", ["with cap: pass", ASYNCHRONOUS], ids=["sync", "async"])
def test_a_process_that_survives_a_sigterm_while_a_capture_opens_records_nothing_and_captures_again(
    tmp_path: Path, opening: str
) -> None:
    survive = "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
    after = """
assert not engine.recordings, engine.recordings
with capture(2, engines=[FakeEngineProfiler(engine)], config=config):
    pass
"""
    assert "heard\n" in run(survive + OPENING + opening + after, tmp_path)
    assert states(parts(tmp_path)[0]).items() >= {"spans": "skipped", "replica 0": "missing"}.items()
    assert manifest(tmp_path, 2).state == "ok"


@pytest.mark.needs("torch")
@pytest.mark.parametrize("ending", ["", "raise ValueError('mine')", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_torch_trace_left_open_at_exit_is_written(tmp_path: Path, ending: str) -> None:
    # Without stepscope, torch's profiler segfaults here.
    process = start(TORCH + f"capture(1, config=config).open()\nwork()\n{ending}", tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (0, 1, -signal.SIGTERM), err
    (part,) = parts(tmp_path)
    (trace,) = [item for item in part.expected if item.name == "torch trace"]
    assert trace.state == "ok", err
    assert (step(tmp_path).root / trace.artifacts[0].path).stat().st_size > 100


def test_asyncio_run_that_is_interrupted_closes_the_capture(tmp_path: Path) -> None:
    run(
        """
import asyncio
async def main():
    async with capture(1, config=config):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
""",
        tmp_path,
        expected=130,
    )
    assert parts(tmp_path)[0].closed is not None
    assert manifest(tmp_path).state == "ok"


@pytest.mark.parametrize(
    "prelude",
    [pytest.param("", id="spans"), pytest.param(TORCH, id="torch", marks=pytest.mark.needs("torch"))],
)
def test_a_fork_during_a_capture_harms_neither_and_is_said(tmp_path: Path, prelude: str) -> None:
    run(
        prelude
        + """
with capture(1, config=config) as cap:
    pid = os.fork()
    if pid == 0:
        with span("child"):
            pass
        sys.exit(5)  # runs atexit handlers
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    with span("parent"):
        pass
cap.result.raise_for_missing()
""",
        tmp_path,
    )
    assert [line.stage for line in lines(tmp_path) if isinstance(line, Span)] == ["parent"]
    (part,) = parts(tmp_path)
    (absent,) = part.absent
    assert absent.state == "skipped"
    assert "forked" in absent.reason


@pytest.mark.parametrize("leaving", ["sys.exit(5)", "pass"])
def test_a_forked_child_that_leaves_the_block_ends_nothing_of_its_parents(
    tmp_path: Path, leaving: str
) -> None:
    out = run(
        f"""
from stepscope import on_capture
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
on_capture(lambda result: os.write(1, b"handed over"))
engine = FakeEngine()
with capture(1, engines=[FakeEngineProfiler(engine)], config=config) as cap, span("outer"):
    recordings = dict(engine.recordings)
    pid = os.fork()
    if pid == 0:
        {leaving}
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert cap.result.manifest().state == "pending"
if pid == 0:
    assert engine.recordings == recordings != {{}}
    assert not cap.result.captured
    sys.exit(5)
cap.result.raise_for_missing()
""",
        tmp_path,
    )
    assert out.count("handed over") == 1
    recorded = lines(tmp_path)
    assert [line.stage for line in recorded if isinstance(line, Span)] == ["outer"]
    assert sum(isinstance(line, End) for line in recorded) == 1
    assert manifest(tmp_path).state == "ok"


def test_a_spawned_child_may_capture_for_itself(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        """
import multiprocessing, sys
from stepscope import ProfileConfig, capture, span

def child(folder):
    config = ProfileConfig(save_path=folder, steps="every:1", roles={"x": {}})
    with capture(1, config=config, role="env"), span("child"):
        pass

if __name__ == "__main__":
    config = ProfileConfig(save_path=sys.argv[1], steps="every:1", roles={"x": {}})
    with capture(1, config=config), span("parent"):
        process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
        process.start()
        process.join()
        assert process.exitcode == 0
"""
    )
    env = {**os.environ, "STEPSCOPE_RUN_ID": "cafe0001"}
    subprocess.run([sys.executable, script, str(tmp_path / "run")], check=True, env=env, timeout=120)
    assert {part.process.role for part in parts(tmp_path)} == {"trainer", "env"}
    assert {part.run_id for part in parts(tmp_path)} == {"cafe0001"}


@pytest.mark.needs("torch")
def test_a_disk_that_fills_up_costs_the_trace_and_not_the_step(tmp_path: Path) -> None:
    # RLIMIT_FSIZE is the nearest thing to a full disk that a process can make for itself: writes fail midway.
    out = run(
        TORCH
        + """
import resource
with capture(1, config=config) as cap:
    work()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
print("trained on")
cap.result.wait()
""",
        tmp_path,
    )
    assert "trained on" in out
    (trace,) = [item for item in parts(tmp_path)[0].expected if item.name == "torch trace"]
    assert trace.state == "failed"
    assert not list(step(tmp_path).traces.rglob("*.json.gz"))
    assert not [path for path in step(tmp_path).root.rglob(".*") if path.is_file()]


def test_a_folder_that_becomes_read_only_costs_the_record_and_not_the_run(tmp_path: Path) -> None:
    out = run(
        """
import ctypes, pathlib
if os.geteuid() == 0:  # whom no mode of a folder binds, as long as it has CAP_DAC_OVERRIDE
    libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, sets) == 0
    sets[0] &= ~0b10
    assert libc.capset(head, sets) == 0
run = pathlib.Path(sys.argv[1])
def set_folders(mode):
    for path in [run, *run.rglob("*")]:
        if path.is_dir():
            path.chmod(mode)
with capture(1, config=config) as cap:
    with span("before"):
        pass
    set_folders(0o555)
    try:
        (run / "step_000001" / "new").touch()
    except PermissionError:
        print("read-only")
    with span("after"):
        pass
print(cap.result.wait().state)
with capture(2, config=config) as cap, span("nowhere"):
    pass
print(cap.result.wait().state)
set_folders(0o755)
with capture(3, config=config) as cap, span("again"):
    pass
print(cap.result.wait().state)
""",
        tmp_path,
    )
    assert out.splitlines()[:4] == ["read-only", "ok", "failed", "ok"]
    assert out.count("writing the manifest") == 1
    assert [line.stage for line in lines(tmp_path) if isinstance(line, Span)] == ["before", "after"]
    assert parts(tmp_path)[0].closed is None  # its last word could not be written
    assert manifest(tmp_path).state == "missing"
    assert parts(tmp_path, 3)[0].closed is not None


def test_two_runs_write_into_one_folder_at_once(tmp_path: Path) -> None:
    code = """
for number in range(1, 6):
    with capture(number, config=config), span("update"):
        time.sleep(0.01)
"""
    both = [start(code, tmp_path), start(code, tmp_path)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(RunLayout(tmp_path / "run").runs()) == 2
    for number in range(1, 6):
        manifests = parts(tmp_path, number)
        assert len({part.run_id for part in manifests}) == 2
        assert all(item.state == "ok" for part in manifests for item in part.expected if item.name == "spans")


def test_a_file_that_another_process_has_just_written_is_not_replaced(tmp_path: Path) -> None:
    assert [write_new(tmp_path / "run.json", data) for data in (b"first", b"second")] == [True, False]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]


PEER = """
with capture(1, config=config):
    print("open", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process of this run, in the middle of step 1, that goes on when it is told to."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + PEER, str(tmp_path / "run")],
        env={**os.environ, "STEPSCOPE_RUN_ID": run_id(), "STEPSCOPE_RANK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def files_of(result: CaptureResult) -> CapturedFiles:
    assert result._files is not None
    return result._files


def captured_beside(folder: Path) -> CaptureResult:
    config = ProfileConfig(
        save_path=folder / "run", steps=[1], roles={"rollout": {"ranks": "all", "profiler": "off"}}
    )
    with capture(1, config=config) as cap:
        pass
    return cap.result


def test_a_wait_lasts_until_a_peer_that_nobody_called_has_closed(
    tmp_path: Path, peer: subprocess.Popen[str]
) -> None:
    result = captured_beside(tmp_path)
    assert files_of(result).unfinished()
    assert peer.stdin is not None
    peer.stdin.write("\n")
    peer.stdin.flush()
    result.raise_for_missing(60)
    assert not files_of(result).unfinished()


def test_the_last_one_to_close_tells_of_a_peer_that_was_killed(
    tmp_path: Path, peer: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    captured_beside(tmp_path)
    assert "missing" not in caplog.text  # it is open, and nobody knows better
    peer.kill()
    peer.wait()
    captured_beside(tmp_path)
    assert "process is gone" in caplog.text


def test_nobody_waits_for_a_peer_that_was_killed(tmp_path: Path, peer: subprocess.Popen[str]) -> None:
    result = captured_beside(tmp_path)
    peer.kill()
    peer.wait()
    assert not files_of(result).unfinished()
    with pytest.raises(MissingArtifactsError, match="process is gone"):
        result.raise_for_missing(60)
