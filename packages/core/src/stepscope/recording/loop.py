"""One private event loop on a thread of its own: where synchronous code runs a capture's concurrent parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""One writer: `run` (and the fork hook of `capture`, which drops it)."""
_lock = threading.Lock()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` there and waits for it. The loop's thread is a daemon, so this works from atexit too."""
    return asyncio.run_coroutine_threadsafe(work, _running()).result()


def forget() -> None:
    """In a forked child: the parent's loop has no thread here."""
    global _loop
    _loop = None


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="stepscope-loop", daemon=True).start()
        return _loop
