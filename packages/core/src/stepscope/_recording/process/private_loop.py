"""Private event loop for synchronous callers, deadlines, and work that is not cancelled.

`import stepscope` does not load it: asyncio would add 30 ms.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from stepscope._recording.process import fork

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""Runs on a thread of its own. Writers: `_running`, and `forget` in a forked child."""
_lock = threading.RLock()
"""Re-entrant: a signal's handler that closes a capture may interrupt `_running`."""
_UNDO_S = 5.0
"""Longest wait of an interrupted caller for its work to be cancelled, or to end."""


def run(work: Coroutine[Any, Any, T], *, keep: bool = False) -> T:
    """Run `work` on the private loop and wait. The loop's thread is a daemon, so atexit may call this too.

    A Ctrl-C cancels `work` and waits for its end before it is raised: no clean-up may overtake `work`.

    Args:
        keep: `work` is itself a clean-up. A Ctrl-C does not cancel it, waits a while, and leaves it running.
    """
    loop = _running()
    over = threading.Event()
    future: Future[T] | None = None
    scheduled: Coroutine[Any, Any, T] | None = None

    async def tracked() -> T:
        try:
            return await work
        finally:
            over.set()

    try:
        scheduled = tracked()
        future = asyncio.run_coroutine_threadsafe(scheduled, loop)
        return future.result()
    except BaseException:
        if not over.is_set():
            if future is not None and not keep:
                future.cancel()
            over.wait(_UNDO_S)
        for coroutine in (scheduled, work):
            if coroutine is not None and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # it was not even scheduled
        raise


def forget() -> None:
    """Forget the loop in the child of a fork, which does not have its thread."""
    global _loop, _lock
    _loop, _lock = None, threading.RLock()


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return `work`'s result, or raise TimeoutError after `seconds` even if `work` ignores its cancellation.

    (`asyncio.wait_for` waits until `work` ends.)
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_discard_outcome)
    if not task.done() or task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


async def uninterrupted(work: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Run `work` to its end even if the waiting task is cancelled. Return that cancellation, if one came."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.result()
    return cancelled


def cancel_later(cancelled: asyncio.CancelledError) -> None:
    """Cancel the next wait of the running task, which raises another exception than its cancellation.

    So neither is lost (asyncio's TaskGroup does the same from Python 3.13 on). Nothing is cancelled if the
    code that cancelled is left by then, a timeout for example. Python 3.10 cannot tell, and loses it.
    """
    task: Any = asyncio.current_task()
    if not hasattr(task, "uncancel"):
        return

    def cancel() -> None:
        if task.cancelling():
            task.uncancel()  # the count of those who asked stays
            task.cancel(*cancelled.args)

    task.get_loop().call_soon(cancel)


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            # At an interpreter's exit it may start no more: then nobody must wait for that loop.
            threading.Thread(target=loop.run_forever, name="stepscope-loop", daemon=True).start()
            _loop = loop
        return _loop


def _discard_outcome(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: nobody waits for it any more


fork.forgets("private loop", forget)
