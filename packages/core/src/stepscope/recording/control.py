"""Limits of a capture, watched from beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Watchdog:
    """Calls `expired` once, on a thread of its own, unless cancelled within `seconds`."""

    def __init__(self, seconds: float, expired: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, expired)
        self._timer.daemon = True
        self._timer.name = "stepscope-watchdog"
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
