"""Hooks of the Ascend profiler in the process, for recordings of other code, exits, and forked children."""

from __future__ import annotations

import atexit
import os
import threading
from functools import partial

from stepscope.backends.threaded.window_thread import run_on
from stepscope.backends.torch import foreign_sessions
from stepscope.errors import ProfilerBusyError
from stepscope_npu import _operators, _recordings, _window
from stepscope_npu._versions import TorchNpu

_hooking = threading.RLock()
_hooked = False


def hook(torch_npu: TorchNpu) -> None:
    """Install the hooks before the first recording of this process."""
    global _hooked
    with _hooking:
        if _hooked:
            return
        _hooked = True
        foreign_sessions.watch(partial(_before_another_of_torch, torch_npu))
        _recordings.watch(torch_npu, partial(_before_another_of_torch_npu, torch_npu))
        os.register_at_fork(after_in_child=_in_child)
        # Without a stop, everything is lost. Registered after torch_npu's own handler, so it runs before it.
        atexit.register(_at_exit)


def _before_another_of_torch(torch_npu: TorchNpu) -> None:
    _before_another(torch_npu, "torch.profiler")


def _before_another_of_torch_npu(torch_npu: TorchNpu) -> None:
    if _before_another(torch_npu, "torch_npu.profiler"):
        _recordings.keep_open_for_theirs(torch_npu)


def _before_another(torch_npu: TorchNpu, profiler: str) -> bool:
    """End the open window, because other code starts a profiler in this process. Return whether a window was
    open.
    """
    window = _window.NpuWindow.current
    if window is not None:
        _end(window, profiler)
    _operators.leave(torch_npu)
    return window is not None


def _end(window: _window.NpuWindow, profiler: str) -> None:
    thread = threading.current_thread().name
    task = run_on(window.thread, partial(window.end, f"other code started {profiler} on thread {thread}"))
    if not task.done:
        task.cancel()
        raise ProfilerBusyError(
            f"{profiler} cannot start on thread {thread}: {window.name} is being recorded on "
            f"{window.thread.name}, which does not answer. Fix: profile outside of captures"
        )


def _at_exit() -> None:
    """End an open window. A later stop() still gets its recording."""
    window = _window.NpuWindow.current
    if window is not None:
        run_on(window.thread, window.end)


def _in_child() -> None:
    _window.forget()
    _operators.forget()
