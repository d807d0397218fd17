"""The preparation of this process, before its first captured step."""

from __future__ import annotations

import os

_process = 0
"""Id of the process if it was prepared; a forked child was not. One writer: `mark`."""


def mark() -> None:
    """Note that this process was prepared."""
    global _process
    _process = os.getpid()


def is_prepared() -> bool:
    """Return whether `prepare` ran in this process, or did what it does before the first step."""
    return _process == os.getpid()
