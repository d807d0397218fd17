"""What torch.profiler needs of the process around it: room for other sessions, an end before exit, quiet
children.
"""

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
    """Before the first session of this process. Imports torch."""
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
    """Other code opens a torch.profiler session on this thread: ours makes room, whole."""
    window = torch_window.current
    if window is None:
        return
    thread = threading.current_thread().name
    reason = f"other code started torch.profiler on thread {thread}"
    task = run_on(window.thread, partial(window.end, reason))
    if not task.done:
        task.cancel()
        raise ProfilerBusyError(
            f"torch.profiler cannot start on thread {thread}: {window.name} is being recorded on "
            f"{window.thread.name}, which does not answer, and two sessions crash the process. "
            "Fix: torch.all_threads: true, or profile outside of captures"
        )


def _at_exit() -> None:
    """A window that is open when the interpreter exits is a segmentation fault. A stop() after this still
    gets what it recorded.
    """
    window = torch_window.current
    if window is not None:
        run_on(window.thread, window.end)


def _in_child() -> None:
    """After fork, in the child: the session is the parent's, and a profiler of the child's own may come."""
    import torch

    record_function_scopes.forget()
    window = torch_window.forget()
    if window is not None:
        foreign_sessions.forget()
        # Its callbacks are set here too, on each thread of the child if it records all threads, and would
        # record every operator for nobody.
        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]  # torch: not in its stub
        if window.options.recorded["with_stack"]:
            sys.setprofile(None)  # and every call
    # A thread of Kineto's, which a fork does not copy, is waited for by one of its destructors: exit() would
    # hang for ever.
    libc.leave_without_destructors()
