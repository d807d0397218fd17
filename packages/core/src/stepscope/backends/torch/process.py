"""Hooks of torch.profiler in the process: sessions of other code, exit, and forked children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import partial

from stepscope.backends.threaded.window_thread import run_on
from stepscope.backends.torch import foreign_sessions, libc, record_function_scopes
from stepscope.backends.torch import window as torch_window
from stepscope.errors import ProfilerBusyError

_hooking = threading.RLock()
_hooked = False


def hook() -> None:
    """Install the hooks before the first session of this process. Imports torch."""
    global _hooked
    with _hooking:
        if _hooked:
            return
        _hooked = True
        foreign_sessions.watch(_before_another_session)
        record_function_scopes.watch()
        os.register_at_fork(after_in_child=_in_child)
        atexit.register(_at_exit)


def _before_another_session() -> None:
    """End the open window, because other code opens a torch.profiler session on this thread."""
    window = torch_window.TorchWindow.current
    if window is None:
        return
    thread = threading.current_thread().name
    reason = f"other code started torch.profiler on thread {thread}"
    task = run_on(window.thread, partial(window.end, reason))
    if not task.done:
        task.cancel()
        raise ProfilerBusyError(
            f"torch.profiler cannot start on thread {thread}: {window.name} is being recorded on "
            f"{window.thread.name}, which does not answer, and two sessions would crash the process. "
            "Fix: torch.all_threads: true, or profile outside of captures"
        )


def _at_exit() -> None:
    """End an open window before the exit, where it would crash. A later stop() still gets its recording."""
    window = torch_window.TorchWindow.current
    if window is not None:
        run_on(window.thread, window.end)


def _in_child() -> None:
    """Detach a forked child from the session of its parent, so that it may profile on its own."""
    import torch

    record_function_scopes.forget()
    window = torch_window.forget()
    if window is not None:
        foreign_sessions.forget()
        # The child inherits its callbacks, on each thread if it records all threads. They would record every
        # operator for nothing.
        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]  # torch: not in its stub
        if window.options.recorded["with_stack"]:
            sys.setprofile(None)  # and every call
    # A destructor of Kineto waits for a thread that a fork does not copy: exit() would hang.
    libc.leave_without_destructors()
