"""The closing of what is still open when the process ends by exit or SIGTERM; and the handler of SIGUSR1.

SIGUSR1 requests a capture of the next step of this process.

If a process exited with an open window, torch's profiler would segfault and recordings would be lost. A close
may take `EXIT_S` at exit, but only `SIGTERM_S` after SIGTERM, because schedulers soon send SIGKILL.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

from stepscope._recording.process import failures, identity
from stepscope.backends.undisturbed import postponed
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files.manifest import Ending

EXIT_S = 60.0
SIGTERM_S = 5.0
GRACE_S = 2.0
"""Time for disk writes after the deadline of workers and engines."""

_closers: dict[str, tuple[int, Callable[[Ending, float], None]]] = {}
"""{name: (order, function)}. One writer: `on_exit`."""
_is_installed = False
"""True if an `atexit` function is registered. One writer: `install`."""
_before: Callable[[int, FrameType | None], object] | int | None = None
"""The SIGTERM handler that stepscope's handler has replaced, or None before that."""
is_in_call: Callable[[], bool] = lambda: False  # noqa: E731
"""Returns whether a recorded call is running in this process. One writer: `activation`."""


def on_exit(name: str, close: Callable[[Ending, float], None], order: int) -> None:
    """Register `close(ending, deadline_s)`, to be called at the end of a process in which `install` was
    called.

    Args:
        order: Functions with a lower order are called earlier.
    """
    _closers[name] = order, close


def install() -> None:
    """Call the registered functions at the end of this process. SIGTERM is handled only if this is called on
    the main thread, as Python requires.
    """
    global _is_installed, _before
    if not _is_installed:
        atexit.register(_at_exit)
        _is_installed = True
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is not on_sigterm
    ):
        standing = signal.getsignal(signal.SIGTERM)
        if standing is None or standing == signal.SIG_IGN:
            return  # the signal has a handler in C, or is ignored on purpose
        _before = standing
        signal.signal(signal.SIGTERM, on_sigterm)


def _at_exit() -> None:
    close_everything(Ending("exit", "the process exited"), EXIT_S)


def on_sigterm(number: int, frame: FrameType | None) -> None:
    if postponed(partial(on_sigterm, number, frame)):
        return
    if identity.waits_for_tasks() and not is_in_call():  # Ray ends idle workers with SIGTERM
        ending = Ending("exit", "Ray ended the process, which ran no call")
    else:
        ending = Ending("signal", "the process was terminated (SIGTERM)")
    close_everything(ending, SIGTERM_S)
    if callable(_before):
        _before(number, frame)
        return
    # The process ends by the signal, as is the default, so that its exit status names the signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def close_everything(ending: Ending, deadline_s: float) -> None:
    """Call all registered functions, which close captures, recorders and files."""
    for name, (_, close) in sorted(_closers.items(), key=lambda item: item[1][0]):
        try:
            close(ending, deadline_s)
        except ours() as error:
            failures.note(f"closing {name} at the end of the process", error)


_came = 0
"""Number of SIGUSR1 signals received. One writer: the handler."""
_answered = 0
"""Number of SIGUSR1 signals that a captured step has answered. One writer: `take`."""


def handle(config: ProfileConfig) -> None:
    """Handle SIGUSR1 in this process, if `config` listens for requests and no other code handles the signal.

    Do nothing if this is not the main thread, because Python sets signal handlers only there.
    """
    if not config.control.requests or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not _handled_from_c():
        signal.signal(signal.SIGUSR1, _on_signal)


def pending() -> bool:
    """Return whether a SIGUSR1 was received that no captured step has answered."""
    return _came != _answered


def take() -> bool:
    """Return `pending()`, and mark all signals as answered by the step that begins now."""
    global _answered
    came, before = _came, _answered
    _answered = came
    return came != before


def _handled_from_c() -> bool:
    """Return whether C code, such as faulthandler, has installed a handler for SIGUSR1. Python does not
    report such handlers.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except ours(OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _came
    _came += 1
