"""A Ctrl-C at any moment of closing: nothing stays recording, and the manifest is written.

It is raised where the interpreter looks for signals, on entering a function of ours or of torch's profiler,
or after a call into C: at some of these moments, spread over all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pytest

from packages.core.tests.interruptions import LEFTOVERS, OURS, Signal
from stepscope import ProfileConfig, capture, span
from stepscope._recording.capture import capture as captures
from stepscope._recording.process import exports, private_loop
from stepscope._recording.spans import slot
from stepscope.backends import window_thread
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.torch import foreign_sessions, window
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Manifest
from stepscope.files.storage import write_atomic
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

if TYPE_CHECKING:
    from torch.profiler.profiler import _KinetoProfile as Profile

TESTING = os.path.join(OURS, "testing")
TORCHS = ("torch/autograd/profiler.py", "torch/profiler/profiler.py")

pytestmark = LEFTOVERS


def ctrl_c(number: int) -> Signal:
    def press() -> None:
        raise KeyboardInterrupt

    return Signal(number, press, is_interrupted)


def is_interrupted(file: str) -> bool:
    return file.endswith(TORCHS) or (file.startswith(OURS) and not file.startswith(TESTING))


def closed(cap: captures.Capture, interrupter: Signal) -> None:
    cap.open()
    with span("reward"):
        pass
    sys.setprofile(interrupter)
    cap.close()


def closed_in_a_loop(cap: captures.Capture, interrupter: Signal) -> None:
    async def step() -> None:
        await cap.aopen()
        with span("reward"):
            pass
        sys.setprofile(interrupter)
        await cap.aclose()
        sys.setprofile(None)

    asyncio.run(step())


def hidden_files(folder: Path) -> list[Path]:
    """Return the files that are, or were, being written."""
    return [path for path in folder.rglob(".*") if path.name != ".recordings"]


Way: TypeAlias = Callable[[captures.Capture, Signal], None]
"""Opens a capture, and closes it under the interrupter."""


def interrupted(cap: captures.Capture, number: int, way: Way) -> str | None:
    """Interrupt a capture. Return the place of the Ctrl-C; None if closing was over before it."""
    interrupter = ctrl_c(number)
    before = sys.getprofile()
    try:
        way(cap, interrupter)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    return interrupter.where


def every(stride: int, folder: Path, monkeypatch: pytest.MonkeyPatch, tool: str, way: Way) -> int:
    """Close captures that are interrupted at each `stride`th moment, and check the leftovers."""
    monkeypatch.setattr(private_loop, "_UNDO_S", 0.5)
    config = ProfileConfig(
        save_path=folder,
        steps="0:1000",
        tool=tool,
        torch={"activities": ["cpu"]},
        roles={"*": {"ranks": "all"}},
        control={"requests": False},
    )
    for count in itertools.count():
        engine = FakeEngine()
        cap = capture(count, engines=[FakeEngineProfiler(engine)], config=config)
        where = interrupted(cap, stride * count, way)
        if captures.opened() is cap:  # before it began to close: then the end of the process does
            cap.close(error="the process exited")
        assert captures.opened() is None, where
        assert slot.session() is None, where
        assert PROCESS_LOCK.holder is None, where
        assert not engine.recordings, where
        exports.exporter().drain(10)  # it writes `manifest.json`
        written = RunLayout(folder).step(count).manifest.read_bytes()
        (part,) = msgspec.json.decode(written, type=Manifest).processes
        assert part.closed is not None, where
        if tool == "torch":
            assert foreign_sessions.busy() is None, where
        else:
            assert not hidden_files(folder), where  # a trace of torch may be on its way
        if way is closed:  # a loop that ends takes an engine's answer with it
            assert {item.name: item.state for item in part.expected}["replica 0"] == "ok", where
            assert all(item.pending != "closing" for item in part.expected), where
        if where is None:
            return count
    raise AssertionError("unreachable")


def test_a_ctrl_c_while_a_file_is_written_leaves_the_old_or_the_new_one_and_no_other(tmp_path: Path) -> None:
    for number in itertools.count():
        file = tmp_path / str(number) / "manifest.json"
        interrupter = ctrl_c(number)
        try:
            sys.setprofile(interrupter)
            write_atomic(file, b"{}")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        left = [path.name for path in file.parent.glob("*")]
        assert left in ([], [file.name]), interrupter.where
        if interrupter.where is None:
            assert number > 5
            return


def test_a_ctrl_c_while_a_capture_closes_leaves_nothing_recording_and_a_whole_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert every(3, tmp_path, monkeypatch, "cuda_memory", closed) > 20


def test_a_ctrl_c_that_ends_the_loop_in_which_a_capture_closes_leaves_nothing_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert every(3, tmp_path, monkeypatch, "cuda_memory", closed_in_a_loop) > 20


@pytest.mark.needs("torch")
def test_a_ctrl_c_while_torchs_window_is_closed_leaves_no_session_of_torch_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: F401  # loaded, so that there is something to record

    assert every(3, tmp_path, monkeypatch, "torch", closed) > 20


@pytest.mark.needs("torch")
def test_a_ctrl_c_as_soon_as_torchs_session_has_begun_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: F401

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted_once(profile: Profile) -> str | None:
        monkeypatch.setattr(window, "_stop", stop)
        raise KeyboardInterrupt

    config = ProfileConfig(
        save_path=tmp_path, steps="0:10", torch={"activities": ["cpu"]}, roles={"*": {"ranks": "all"}}
    )
    stop = window._stop
    with monkeypatch.context() as interrupting:
        interrupting.setattr(window_thread, "weakref", SimpleNamespace(finalize=interrupted))
        with pytest.raises(KeyboardInterrupt):
            capture(1, config=config).open()
    assert foreign_sessions.busy() is None
    assert PROCESS_LOCK.holder is None
    monkeypatch.setattr(window, "kineto_has_started", False)
    monkeypatch.setattr(window, "_stop", interrupted_once)  # of the empty window
    with pytest.raises(KeyboardInterrupt):
        capture(2, config=config).open()
    assert PROCESS_LOCK.holder is None
    drain = window_thread.MAIN._drain

    def drain_later() -> None:  # it is in the line of the main thread
        monkeypatch.setattr(window_thread.MAIN, "_drain", drain)
        raise KeyboardInterrupt

    monkeypatch.setattr(window_thread.MAIN, "_drain", drain_later)
    with pytest.raises(KeyboardInterrupt):
        capture(3, config=config).open()
    with capture(4, config=config) as cap:
        pass
    cap.result.wait()
    assert cap.result.problems() == []
