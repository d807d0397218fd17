"""The event loop on which captures are opened and closed. It outlives the event loops of all callers.

If a caller gives up (a deadline, a cancelled task, a loop that ends), its work goes on here, so that every
recording that began is also ended.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""The work loop, or None before its first use. Writers: `_running`, and a forked child."""
_lock = threading.Lock()
"""Lock that is held while the loop is made. A forked child replaces it."""


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin `work` on the loop. Work of one caller begins in the order in which it was given."""
    future = asyncio.run_coroutine_threadsafe(work, _running())
    future.add_done_callback(_seen)
    return future


async def result_of(future: Future[T]) -> T:
    """Return the result of `future`. If the waiting task is cancelled, the work goes on."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="stepscope-vllm", daemon=True).start()
        return _loop


def _seen(future: Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # callers that wait raise it; asyncio need not log it as well


def _after_fork() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()  # the parent may have held the lock


os.register_at_fork(after_in_child=_after_fork)
