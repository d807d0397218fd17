"""Two functions of glibc that Python does not wrap. With another C library, nothing happens."""

from __future__ import annotations

import ctypes
from functools import cache


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps most of it, 1.5 GB after a trace of 400k events."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_without_destructors() -> None:
    """Make exit() end the process, with its status, without running the destructors registered so far.

    Python has finalised and flushed its output by then.
    """
    library = _library()
    if hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)  # gets exit()'s status; the last one registered runs first


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
