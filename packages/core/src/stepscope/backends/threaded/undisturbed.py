"""Work on a profiler that must not be interrupted by a close: a close by a signal's handler is delayed until
the work has ended.

Otherwise the handler would wait for another thread, which may wait for the work itself, or for a lock that
the work holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_undisturbed: dict[int, list[Callable[[], object]]] = {}
"""{thread: calls to make at the end of its `undisturbed` work}."""


def undisturbed(work: Callable[[], T]) -> T:
    """Call `work`. A close by a signal's handler on this thread is delayed by `postponed` until `work` has
    ended.
    """
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


def postponed(call: Callable[[], object]) -> bool:
    """Postpone `call` to the end of this thread's `undisturbed` work, and return True. Return False, and do
    nothing, if the thread has no such work.
    """
    calls = _undisturbed.get(threading.get_ident())
    if calls is None:
        return False
    calls.append(call)
    return True
