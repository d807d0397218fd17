"""Signals and the end of the process, by interpreter exit or SIGTERM, which close everything that is open.

SIGUSR1 asks this process for its next step.

torch's profiler segfaults when a process exits with a window open, and a killed process leaves nothing
behind. At exit closing has the export deadline, on SIGTERM a few seconds (schedulers follow with SIGKILL).
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
from stepscope.backends.threaded.undisturbed import postponed
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files.manifest.records import Ending

EXIT_S = 60.0
SIGTERM_S = 5.0
GRACE_S = 2.0
"""Time for writing to the disk, beyond the deadline for workers and engines."""

_closers: dict[str, tuple[int, Callable[[Ending, float], None]]] = {}
"""{name: (order, function that closes)}. One writer: `on_exit`."""
_is_installed = False
"""True if an `atexit` function is registered. One writer: `install`."""
_before: Callable[[int, FrameType | None], object] | int | None = None
"""The SIGTERM handler that was installed before ours."""
is_in_call: Callable[[], bool] = lambda: False  # noqa: E731
"""Returns whether a recorded call runs in this process. One writer: `activation`."""


def on_exit(name: str, close: Callable[[Ending, float], None], order: int) -> None:
    """Register `close(ending, deadline_s)`, which is called when a process that called `install` ends.

    Args:
        order: Functions with the lowest order are called first.
    """
    _closers[name] = order, close


def install() -> None:
    """Watch for the end of this process. SIGTERM is watched only if called on the main thread (Python's
    rule).
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
            return  # set from C, or ignored on purpose: not ours to change
        _before = standing
        signal.signal(signal.SIGTERM, on_sigterm)


def _at_exit() -> None:
    close_everything(Ending("exit", "the process exited"), EXIT_S)


def on_sigterm(number: int, frame: FrameType | None) -> None:
    if postponed(partial(on_sigterm, number, frame)):
        return
    if identity.waits_for_tasks() and not is_in_call():  # Ray ends its workers so, when a program is over
        ending = Ending("exit", "Ray ended the process, which ran no call")
    else:
        ending = Ending("signal", "the process was terminated (SIGTERM)")
    close_everything(ending, SIGTERM_S)
    if callable(_before):
        _before(number, frame)
        return
    # The default is to die of the signal, and that is what the parent must see.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def close_everything(ending: Ending, deadline_s: float) -> None:
    """Close everything that is open in this process, and write its files."""
    for name, (_, close) in sorted(_closers.items(), key=lambda item: item[1][0]):
        try:
            close(ending, deadline_s)
        except ours() as error:
            failures.note(f"closing {name} at the end of the process", error)


_came = 0
"""Number of SIGUSR1 signals received. One writer: the handler."""
_answered = 0
"""Number of received SIGUSR1 signals that a captured step has answered. One writer: `take`."""


def handle(config: ProfileConfig) -> None:
    """Handle SIGUSR1 in this process, if `config` listens for requests and nothing else handles it.

    Does nothing outside the main thread (Python's rule).
    """
    if not config.control.requests or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not _handled_from_c():
        signal.signal(signal.SIGUSR1, _on_signal)


def pending() -> bool:
    """Return whether a signal was received that no captured step has answered."""
    return _came != _answered


def take() -> bool:
    """Return `pending()`, and count all signals as answered by the step that begins now."""
    global _answered
    came, before = _came, _answered
    _answered = came
    return came != before


def _handled_from_c() -> bool:
    """Return whether a handler is installed that Python does not know, such as faulthandler's or a
    library's.
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
