"""Work on a profiler that no close may come into: what a signal's handler closes meanwhile waits for its end.

The handler would wait for another thread, and that perhaps for the work itself, or for a lock that it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_undisturbed: dict[int, list[Callable[[], object]]] = {}
"""{thread: calls to make at the end of its `undisturbed` work}."""


def undisturbed(work: Callable[[], T]) -> T:
    """Call `work`. What a signal's handler closes meanwhile on this thread is closed after it by `after`."""
    thread = threading.get_ident()
    if thread in _undisturbed:
        return work()
    calls: list[Callable[[], object]] = []
    try:
        _undisturbed[thread] = calls
        return work()
    finally:
        _undisturbed.pop(thread, None)
        for call in calls:
            call()


def after(call: Callable[[], object]) -> bool:
    """Delay `call` until the end of this thread's `undisturbed` work. Return False if the thread has no such
    work.
    """
    calls = _undisturbed.get(threading.get_ident())
    if calls is None:
        return False
    calls.append(call)
    return True
