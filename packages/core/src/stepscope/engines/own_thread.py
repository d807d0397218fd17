"""Blocking calls made from coroutines, each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


async def own_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run `fn(*args)` on a daemon thread made for it (0.1 ms), like `asyncio.to_thread`.

    The loop's default executor is the user's: full of tools or generations that block, it would hold up a
    capture until one of them is done. After a cancellation the thread goes on and its result is dropped.
    """
    context, result = copy_context(), Future[T]()

    def work() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(context.run(fn, *args))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name=f"stepscope-{getattr(fn, '__name__', 'call')}", daemon=True).start()
    return await asyncio.wrap_future(result)
