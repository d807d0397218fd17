"""A coroutine that is cancelled at the n-th place where it waits, for every n."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledAt:
    """Runs a coroutine, and cancels its task at the n-th suspension of it or of any task it makes.

    The first is number 1. It is as if another task had called `Task.cancel()` at that moment.

    Args:
        again: Cancel it at all later ones too.
    """

    def __init__(self, suspension: int, *, again: bool = False) -> None:
        self.suspension = suspension
        self.again = again
        self.seen = 0
        """Suspensions so far."""
        self._cancelled: asyncio.Task[Any] | None = None

    @property
    def came(self) -> bool:
        """Return whether there were as many."""
        return self.seen >= self.suspension

    def run(self, work: Coroutine[Any, Any, T]) -> T | BaseException:
        """Run `work` in a separate event loop. Return its result or its exception."""
        return asyncio.run(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T | BaseException:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        task: asyncio.Task[T] = loop.create_task(work)
        self._cancelled = task
        try:
            return await task
        except BaseException as error:
            return error
        finally:
            loop.set_task_factory(None)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(work, self._suspended), loop=loop, **options)

    def _suspended(self) -> None:
        self.seen += 1
        now = self.came if self.again else self.seen == self.suspension
        if now and self._cancelled is not None:
            self._cancelled.cancel()


class _Counted(Coroutine[Any, Any, T]):
    """`work`, which calls `suspended` each time it is about to wait."""

    def __init__(self, work: Coroutine[Any, Any, T], suspended: Callable[[], None]) -> None:
        self._work = work
        self._suspended = suspended

    def send(self, value: Any) -> Any:
        awaited = self._work.send(value)
        self._suspended()
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited = self._work.throw(*error)
        self._suspended()
        return awaited

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()
