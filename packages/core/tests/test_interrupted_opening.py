"""A signal at any moment of opening: its handler raises, or closes the capture and lets the program go on.

As in `test_interrupted`, it comes where the interpreter looks for signals: at every such moment of the
profiler's own start, and at some of all others.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.core.tests.interruptions import LEFTOVERS, OURS, Signal
from stepscope import ProfileConfig, capture
from stepscope._recording.capture import capture as captures
from stepscope._recording.capture.work import CaptureWork
from stepscope._recording.fanout.messages import StartRequest, StopRequest
from stepscope._recording.fanout.worker_side import start_worker, stop_worker
from stepscope._recording.process import exports, shutdown
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.session import session
from stepscope._recording.session.profiler_windows import Windows
from stepscope._recording.session.session import Session
from stepscope._recording.spans import slot
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.protocol import Backend
from stepscope.backends.torch import foreign_sessions
from stepscope.backends.torch.backend import TorchBackend
from stepscope.backends.undisturbed import postponed
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending, Manifest, ProcessPart
from stepscope.files.sidecar import ProcessInfo
from stepscope.testing.fake_backend import FakeBackend

LIBRARIES = ("torch/autograd/profiler.py", "torch/profiler/profiler.py", "/threading.py")
LEFT_ALONE = tuple(os.path.join(OURS, name) for name in ("config", "files", "errors.py"))
"""Nothing opens there."""

pytestmark = LEFTOVERS


def is_interrupted(file: str) -> bool:
    return file.endswith(LIBRARIES) or (file.startswith(OURS) and not file.startswith(LEFT_ALONE))


def signal_at(number: int, handler: Callable[[], object]) -> Signal:
    return Signal(number, handler, is_interrupted)


@contextmanager
def under(signal: Signal) -> Iterator[None]:
    before = sys.getprofile()
    try:
        sys.setprofile(signal)
        yield
    except (KeyboardInterrupt, SystemExit, RuntimeError):
        pass  # RuntimeError: of a lock of Python's own whose wait was interrupted
    finally:
        sys.setprofile(before)


def raises(_: Callable[[], object]) -> None:
    raise KeyboardInterrupt


def closes(close: Callable[[], object]) -> None:
    close()


def closes_and_raises(close: Callable[[], object]) -> None:
    close()
    raise SystemExit(1)


handlers = pytest.mark.parametrize("handler", [raises, closes, closes_and_raises])


earlier: frozenset[threading.Thread] = frozenset()
"""Threads of other tests. One writer: `as_in_a_run`."""


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note failures in opening instead of raising them, as in a run."""
    global earlier
    earlier = frozenset(threading.enumerate())
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    # An export waits so long for the end of a closing that a signal may have cut off.
    monkeypatch.setattr(session, "_HAND_BACK_S", 0.01)


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    import torch  # noqa: F401  # loaded, so that there is something to record

    return ProfileConfig(
        save_path=str(tmp_path),
        steps="0:1000",
        record="off",  # the flight recorder goes on between captures
        torch={"activities": ["cpu"]},
        roles={"*": {"ranks": "all"}},
        control={"requests": False},
    )


def end_of_the_process() -> None:
    shutdown.close_everything(Ending("signal", "SIGTERM"), deadline_s=0.0)


def nothing_records(where: str | None) -> None:
    assert slot.session() is None, where
    assert captures.opened() is None, where
    assert foreign_sessions.busy() is None, where
    PROCESS_LOCK.acquire("this test")  # raises where it is held by nobody, too
    PROCESS_LOCK.release()
    assert not threads_of_captures(), where


def threads_of_captures() -> list[str]:
    """Return those that do not end by themselves, as one does that was about to begin."""
    names = ("stepscope-spans", "stepscope-watchdog", "stepscope-counters")
    own = [thread for thread in threading.enumerate() if thread.name in names and thread not in earlier]
    until = time.monotonic() + 10
    while any(thread.is_alive() for thread in own) and time.monotonic() < until:
        time.sleep(0.001)
    return [thread.name for thread in own if thread.is_alive()]


def files_left_open(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.islink(link)]
    return [path for path in paths if path.startswith(f"{folder}/")]


def has_claimed(cap: captures.Capture) -> bool:
    return cap.state != "new"


def whole_capture(config: ProfileConfig, step: int) -> None:
    with capture(step, config=config) as cap:
        pass
    cap.result.wait()
    assert cap.result.problems() == []


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("handler", "first"), [(raises, 0), (closes, 3), (closes_and_raises, 6)])
def test_a_signal_while_a_capture_opens_leaves_nothing_recording(
    config: ProfileConfig, tmp_path: Path, handler: Callable[[Callable[[], object]], None], first: int
) -> None:
    whole_capture(config, 999)  # and with it the one-off costs
    for count in itertools.count():
        cap = capture(count, config=config)
        signal = signal_at(first + 9 * count, lambda cap=cap: handler(cap.close))  # type: ignore[misc]  # mypy
        with under(signal):
            cap.open()
        if handler is closes_and_raises and signal.where is not None and has_claimed(cap):
            assert captures.opened() is None, signal.where
        cap.close()
        nothing_records(signal.where)
        exports.exporter().drain(60)  # until `manifest.json` is written
        layout = RunLayout(config.save_path).step(count)
        if layout.manifest.exists():
            (part,) = msgspec.json.decode(layout.manifest.read_bytes(), type=Manifest).processes
            assert part.closed is not None, signal.where
            assert all(item.pending != "closing" for item in part.expected), signal.where
        else:  # closed before anything was written
            assert not layout.root.exists(), signal.where
        if signal.where is None:
            break
    assert count > 30
    whole_capture(config, count + 1)
    assert not files_left_open(tmp_path)


@pytest.mark.needs("torch")
def test_a_capture_that_a_signal_closes_before_its_work_begins_leaves_no_folder(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, cap = CaptureWork.begin, capture(1, config=config)

    def closed_first(work: CaptureWork) -> Coroutine[Any, Any, Session | None]:
        cap.close()
        return begin(work)

    monkeypatch.setattr(CaptureWork, "begin", closed_first)
    cap.open()
    cap.close()
    nothing_records(None)
    assert not RunLayout(config.save_path).step(1).root.exists()


@pytest.mark.needs("torch")
@handlers
@pytest.mark.parametrize("kind", [TorchBackend, lambda _: FakeBackend()], ids=["torch", "fake"])
def test_a_signal_at_any_moment_of_a_profilers_start_and_stop_leaves_it_off(
    config: ProfileConfig,
    tmp_path: Path,
    handler: Callable[[Callable[[], object]], None],
    kind: Callable[[ProfileConfig], Backend],
) -> None:
    process = ProcessInfo(role="actor", rank=0, world_size=1, host="here", pid=os.getpid())
    anchor = ClockAnchor(wall_ns=0, mono_ns=0)
    part = ProcessPart(run_id="r", step=1, process=process, owner=True, opened=anchor, recorded=True, why="")
    kind(config).prepare()
    for number in itertools.count():
        manifest_part = ManifestPart(tmp_path / "part", part)
        windows = Windows(kind(config), config, RunLayout(tmp_path).step(1), manifest_part, None)
        finish = partial(windows.finish, discard="closed")
        # A capture's close does the same in a handler: it does not disturb the start or stop of a profiler.
        signal = signal_at(number, lambda finish=finish: handler(lambda: postponed(finish) or finish()))  # type: ignore[misc]  # mypy
        with under(signal):
            windows.open(None, "actor")
            windows.finish(discard="over")
        windows.finish(discard="over")
        nothing_records(signal.where)
        if signal.where is None:
            break
    assert number > 20


@pytest.mark.needs("torch")
@pytest.mark.parametrize("handler", [raises, closes])
def test_a_signal_while_a_worker_opens_leaves_nothing_recording(
    config: ProfileConfig, handler: Callable[[Callable[[], object]], None]
) -> None:
    whole_capture(config, 999)
    for count in itertools.count():
        request = StartRequest(
            capture_id=f"{handler}{count}", run_id="r", step=count, config=config, role="actor"
        )
        signal = signal_at(19 * count, lambda: handler(end_of_the_process))
        with under(signal):
            start_worker(request)
        stop_worker(StopRequest(capture_id=request.capture_id))
        nothing_records(signal.where)
        if signal.where is None:
            return
