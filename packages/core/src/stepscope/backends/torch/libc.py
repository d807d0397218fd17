"""Two things of the C library that Python has no name for. Where it lacks them (it is not glibc), nothing
happens.
"""

from __future__ import annotations

import ctypes
from functools import cache


def give_memory_back() -> None:
    """Returns freed memory to the system: glibc keeps most of what a large trace used (1.5 GB of 400k
    events).
    """
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_without_destructors() -> None:
    """From now on exit() ends the process with its status before any destructor registered so far has run.

    Python has finalised by then, and what it printed is flushed.
    """
    library = _library()
    if hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)  # gets exit()'s status; the last one registered runs first


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
