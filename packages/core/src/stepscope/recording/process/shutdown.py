"""The end of the process, however it comes: interpreter exit, SIGTERM, a fork's child.

torch's profiler segfaults when a process exits with a window open, and a killed process leaves nothing
behind, so what is open is closed first: at exit within the export deadline, on SIGTERM within a few seconds
(schedulers follow with SIGKILL).
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from stepscope.files.manifest.records import Ending
from stepscope.recording.process import failures

EXIT_S = 60.0
SIGTERM_S = 5.0

_close: Callable[[Ending, float], None] | None = None
"""What closes everything; set by `install`, called at exit and on SIGTERM."""
_before: Callable[[int, FrameType | None], object] | int | None = None
"""The SIGTERM handler that stood before ours."""


def install(close: Callable[[Ending, float], None]) -> None:
    """Registers `close(ending, deadline_s)`; once per process, and for SIGTERM from the main thread alone
    (Python's rule).
    """
    global _close, _before
    if _close is None:
        atexit.register(_at_exit)
    _close = close
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is not _on_sigterm
    ):
        standing = signal.getsignal(signal.SIGTERM)
        if standing is None or standing == signal.SIG_IGN:
            return  # set from C, or ignored on purpose: not ours to change
        _before = standing
        signal.signal(signal.SIGTERM, _on_sigterm)


def _at_exit() -> None:
    _run(Ending("exit", "the process exited"), EXIT_S)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _run(Ending("signal", "the process was terminated (SIGTERM)"), SIGTERM_S)
    if callable(_before):
        _before(number, frame)
        return
    # The default is to die of the signal, and that is what the parent must see.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _run(ending: Ending, deadline_s: float) -> None:
    if _close is None:
        return
    try:
        _close(ending, deadline_s)
    except Exception as error:
        failures.note("closing at the end of the process", error)
