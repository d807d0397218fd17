"""Profiler work that a signal handler must not interrupt with a close: the close is delayed until the work
ends.

A close waits for another thread, which may be waiting for the interrupted work or for a lock that this work
holds. That would be a deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_undisturbed: dict[int, list[Callable[[], object]]] = {}
"""{id of a thread with `undisturbed` work: calls that were postponed to the end of this work}."""


def undisturbed(work: Callable[[], T]) -> T:
    """Return the result of `work()`. Then make the calls that signal handlers on this thread postponed during
    `work`.
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
    """Postpone `call` to the end of this thread's `undisturbed` work and return True, or return False if the
    thread has no such work.
    """
    calls = _undisturbed.get(threading.get_ident())
    if calls is None:
        return False
    calls.append(call)
    return True
