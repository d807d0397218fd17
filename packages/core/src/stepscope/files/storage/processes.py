"""Processes that files of a run name: the boot of their machine, and a check whether one still runs."""

from __future__ import annotations

import os
from functools import cache

from stepscope.errors import ours


@cache
def boot_id() -> str | None:
    """Return the id of the running kernel, whose processes share one wall clock; None if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except ours(OSError):
        return None


def is_running(pid: int) -> bool:
    """Return whether this machine has such a process, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except ours(OSError, OverflowError):  # of another user, or a number from a damaged file
        return True
    return True
