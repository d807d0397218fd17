"""Handler of SIGUSR1, which asks the receiving process for its next step.

Without a handler, the signal ends a process. So the handler is installed as soon as this process is known to
listen. Workers have it too, so that the signal does not end them, although they open no captures.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from stepscope.config import ProfileConfig
from stepscope.errors import ours

_came = 0
"""Number of signals received. One writer: the handler."""
_answered = 0
"""Number of these signals that a captured step has answered. One writer: `take`."""


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
