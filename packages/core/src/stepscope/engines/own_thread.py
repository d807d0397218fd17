"""Threads and event loops of stepscope, separate from the user's.

Blocking calls run on daemon threads: one thread for each call, or one for all calls of an owner.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

opened_on: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("stepscope_opened_on", default=None)
"""Event loop of the code that opens a capture; see `users_loop`. One writer: captures."""


async def own_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run `fn(*args)` on a new daemon thread (0.1 ms), and await the result.

    `asyncio.to_thread` is not used, because the user's blocking calls may fill the loop's default executor,
    and a capture would have to wait. After a cancellation the thread goes on, and its result is dropped.
    """
    context, result = copy_context(), Future[T]()

    def work() -> None:
        if result.set_running_or_notify_cancel():
            _settle(result, partial(context.run, fn, *args))

    threading.Thread(target=work, name=f"stepscope-{getattr(fn, '__name__', 'call')}", daemon=True).start()
    return await asyncio.wrap_future(result)


class WorkThread:
    """One thread that does its owner's blocking work in order. The thread starts with the first work.

    Work whose caller gave up is still completed before the next work begins. The thread ends with its owner.
    It is a daemon thread, unlike the threads of an executor: an engine that never answers must not keep the
    interpreter from exiting.
    """

    def __init__(self, name: str) -> None:
        """
        Args:
            name: Name of the thread, which begins with `stepscope-` so that `is_ours` recognises it.
        """
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. The thread does it even if no caller waits; the future cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put(partial(_settle, future, work))
        return future


def is_ours(thread: threading.Thread) -> bool:
    """Return whether a thread is one of stepscope's."""
    return thread.name.startswith("stepscope-")


def users_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of the code that opens a capture, for an engine that has no event loop yet.

    Return None for synchronous code. `EngineProfiler.start` and `stop` themselves run on a loop of stepscope.
    """
    opened = opened_on.get()
    if opened is not None or is_ours(threading.current_thread()):
        return opened
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _work(works: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # `work` may refer to the owner, and would keep the owner and this thread alive
