"""What a capture needs of asyncio: a private loop for synchronous callers, deadlines, uncancellable work.

Imported where it is used: asyncio costs 30 ms that `import stepscope` does not pay.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from stepscope.recording.process import fork

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""Runs on a thread of its own. Writers: `run`, and `forget` in a forked child."""
_lock = threading.Lock()
_UNDO_S = 5.0
"""How long an interrupted caller waits for its work to be cancelled, or to end."""


def run(work: Coroutine[Any, Any, T], *, keep: bool = False) -> T:
    """Runs `work` on the private loop and waits. The loop's thread is a daemon: atexit may call this too.

    Interrupted (Ctrl-C), `work` is cancelled, and over when this raises: what undoes it must not overtake it.

    Args:
        keep: `work` itself undoes something: interrupted, it is waited for a while, and goes on behind the
            caller's back if that is not enough.
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
        for each in (scheduled, work):
            if each is not None and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                each.close()  # it was not even scheduled
        raise


def forget() -> None:
    """In a forked child: the parent's loop has no thread here."""
    global _loop
    _loop = None


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """`work`'s result, or TimeoutError after `seconds` even if `work` ignores being cancelled.

    (`asyncio.wait_for` waits until it does not.)
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
    """Runs `work` to its end though the waiting task is cancelled; returns that cancellation, if one came."""
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
    """The running task was cancelled, and another exception goes up in its place: the task's next wait is
    cancelled, so that neither is lost. (asyncio's TaskGroup does so from Python 3.13 on.)

    Not where whoever cancelled is left by then, a timeout say. Python 3.10 cannot tell: it is lost there.
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
