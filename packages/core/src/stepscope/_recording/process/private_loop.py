"""Private event loop, on a thread of its own: captures open and close on it, and callers wait for it.

A Ctrl-C, an alarm, or an exception that is thrown into a thread reaches a caller that waits, and never the
work itself. `import stepscope` does not load this module: asyncio would add 30 ms.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from stepscope._recording.process import fork
from stepscope.backends.threaded.undisturbed import undisturbed
from stepscope.errors import ours

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""The event loop, which runs on a thread of its own. Writers: `_running`, and `forget` in a forked child."""
_lock = threading.RLock()
"""Guards `_loop`. Re-entrant, because a signal's handler that closes a capture may interrupt `_running`."""
_UNDO_S = 5.0
"""Longest time that an interrupted caller waits for the cancellation of its work."""


class Job(Generic[T]):
    """Work on the loop, and its outcome.

    Unlike a Future it has no lock, because a signal's handler may begin a wait in the middle of another wait
    on the same thread.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.done = False
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._waiters: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Begin the work, on the loop."""
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the work, on the loop."""
        if self._task is not None:
            self._task.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the work has ended. Return False if it has not ended after `timeout_s`."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiters.append(waiting.release)
        return self.done or waiting.acquire(timeout=-1 if timeout_s is None else timeout_s)

    async def ended(self) -> None:
        """Wait in another event loop until the work has ended."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except ours(RuntimeError):  # that loop is closed
                pass

        self._waiters.append(wake)
        if not self.done:
            await future

    def result(self) -> T:
        """Return the result of the work that has ended, or raise its error."""
        if self._task is None or self._task.cancelled():
            raise CancelledError
        return self._task.result()

    def _end(self, task: asyncio.Task[T]) -> None:
        _discard_outcome(task)
        self.done = True
        for wake in tuple(self._waiters):
            wake()


def submit(work: Coroutine[Any, Any, T]) -> Job[T]:
    """Begin `work` on the loop. Work of one caller begins in the order in which it was submitted.

    Raises:
        RuntimeError: the loop's thread cannot be started.
    """
    job = Job(work)
    try:
        _running().call_soon_threadsafe(job.begin)
    except BaseException:
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()
        raise
    return job


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on the loop and wait. A Ctrl-C cancels `work` and waits for its end before it is raised."""
    job = submit(work)
    try:
        job.wait()
    except BaseException:
        _running().call_soon_threadsafe(job.cancel)
        job.wait(_UNDO_S)
        raise
    return job.result()


def wait_on(job: Job[Any], timeout_s: float | None = None) -> BaseException | None:
    """Wait until `job` is done, or for `timeout_s`. Return the first exception that interrupted the wait.

    A second Ctrl-C ends the wait.
    """
    interruption: BaseException | None = None
    while not job.done:
        try:
            if not job.wait(timeout_s):
                break
        except BaseException as error:
            if interruption is not None and isinstance(error, KeyboardInterrupt):
                break
            interruption = interruption or error
    return interruption


def begin_closing(
    end_here: Callable[[], None], close: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[Job[None], BaseException | None]:
    """Call `end_here` on this thread, then begin `close` on the private loop.

    If `end_here` is interrupted, it is called once more. After a second interruption, the rest of it is
    skipped.

    Returns:
        The job of `close`, and the exception that first interrupted `end_here`, or None.
    """
    interruption: BaseException | None = None
    for attempt in (end_here, end_here, _nothing):
        try:
            undisturbed(attempt)
            return submit(close()), interruption
        except BaseException as error:
            interruption = interruption or error
    raise interruption or RuntimeError("unreachable")


def close_and_wait(
    end_here: Callable[[], None], close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float | None
) -> None:
    """Close as `begin_closing` does, and wait until `close` has ended, or for `timeout_s`.

    Raises:
        BaseException: the first exception that interrupted the wait, or else the error of `close`.
    """
    job, interruption = begin_closing(end_here, close)
    interruption = wait_on(job, timeout_s) or interruption
    if interruption is not None:
        raise interruption
    if job.done:
        job.result()


async def uninterrupted(job: Job[Any]) -> asyncio.CancelledError | None:
    """Wait until `job` is done, even if the waiting task is cancelled. Return such a cancellation."""
    cancelled = None
    while not job.done:
        try:
            await job.ended()
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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


def forget() -> None:
    """Forget the loop in the child of a fork, which does not have its thread."""
    global _loop, _lock
    _loop, _lock = None, threading.RLock()


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name="stepscope-loop", daemon=True).start()
            _loop = loop
        return _loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:  # noqa: S110  # SystemExit of an engine's profiler, which its task hands on too
            pass


def _discard_outcome(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: nobody waits for it any more


fork.forgets("private loop", forget)


def _nothing() -> None: ...
