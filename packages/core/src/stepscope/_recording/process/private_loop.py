"""A private event loop on its own thread, on which captures open and close while callers wait.

A Ctrl-C, an alarm, or an exception that is thrown into a thread interrupts a waiting caller, but not the
work. `import stepscope` does not import this module, because asyncio takes 30 ms.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from stepscope._recording.process import fork
from stepscope.backends.undisturbed import undisturbed
from stepscope.errors import ours

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""The event loop, or None before its first use. Writers: `_running`, and `forget` in a forked child."""
_lock = threading.RLock()
"""Guards `_loop`. Reentrant, because a signal handler that closes a capture may interrupt `_running`."""
_UNDO_S = 5.0
"""Longest time that an interrupted caller waits until its work is cancelled."""


class Job(Generic[T]):
    """Work on the private loop, and its outcome.

    A `Future` is not used. Its lock would deadlock if a signal handler interrupted a wait and then waited
    itself.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.done = False
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._waiters: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Begin the work. Call this on the loop."""
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the work. Call this on the loop."""
        if self._task is not None:
            self._task.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the work has ended, or for `timeout_s`. Return whether it has ended."""
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
            except ours(RuntimeError):  # the waiting loop is closed
                pass

        self._waiters.append(wake)
        if not self.done:
            await future

    def result(self) -> T:
        """Return the result of the ended work, or raise its error."""
        if self._task is None or self._task.cancelled():
            raise CancelledError
        return self._task.result()

    def _end(self, task: asyncio.Task[T]) -> None:
        _discard_outcome(task)
        self.done = True
        for wake in tuple(self._waiters):
            wake()


def submit(work: Coroutine[Any, Any, T]) -> Job[T]:
    """Begin `work` on the private loop. Work begins in the order of submission.

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
    """Run `work` on the private loop and wait for its result. A Ctrl-C is raised after `work` is
    cancelled.
    """
    job = submit(work)
    try:
        job.wait()
    except BaseException:
        _running().call_soon_threadsafe(job.cancel)
        job.wait(_UNDO_S)
        raise
    return job.result()


def wait_on(job: Job[Any], timeout_s: float | None = None) -> BaseException | None:
    """Wait until `job` is done, or for `timeout_s`. Return the first exception that interrupted the wait, or
    None.

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
    """Call `end_here` on this thread, and then begin `close` on the private loop.

    If `end_here` is interrupted, it is called again. After a second interruption, `close` begins anyway.

    Returns:
        The job of `close`, and the first exception that interrupted `end_here`, or None.
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
    """Do what `begin_closing` does, and wait until `close` has ended, or for `timeout_s`.

    Raises:
        BaseException: the first exception that interrupted this function, else the error of `close`.
    """
    job, interruption = begin_closing(end_here, close)
    interruption = wait_on(job, timeout_s) or interruption
    if interruption is not None:
        raise interruption
    if job.done:
        job.result()


async def uninterrupted(job: Job[Any]) -> asyncio.CancelledError | None:
    """Wait until `job` is done, even if the waiting task is cancelled. Return the last cancellation, or
    None.
    """
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
    """Return the result of `work`, or raise `TimeoutError` after `seconds`, even if `work` ignores a
    cancellation.

    `asyncio.wait_for` would wait until `work` ends.
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
    """Forget the loop in a forked child, which does not have its thread."""
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
        except BaseException:  # noqa: S110  # asyncio re-raises SystemExit of a task here
            pass


def _discard_outcome(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved


fork.forgets("private loop", forget)


def _nothing() -> None: ...
