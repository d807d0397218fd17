"""Processes as the files of a run name them: which machine they are of, and whether one still runs."""

from __future__ import annotations

import os
from functools import cache


@cache
def boot_id() -> str | None:
    """Names the running kernel, whose processes all read one wall clock; None where nothing does."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def is_running(pid: int) -> bool:
    """Whether this machine has such a process, of whomever."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
