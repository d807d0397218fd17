"""Results that continue the work of a plain function after it has returned: a coroutine or a future.

`inspect` reports a plain function for an `async def` below a decorator, or for a `def` that returns another
function's coroutine. The span of such a call ends when the result ends. A coroutine is replaced by a
coroutine that awaits the original and ends the span. A coroutine with other references is not replaced,
because other code could await it too. A future gets a callback. Other awaitables, such as Ray's `ObjectRef`,
are not followed; the span ends when the function returns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CoroutineType, NoneType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from stepscope._recording.process import failures
from stepscope._recording.spans.scopes import OFF, Scope, current
from stepscope.errors import ours

if TYPE_CHECKING:
    from asyncio import Future

OVER = frozenset({NoneType, bool, int, float, str, bytes, tuple, list, dict, set, frozenset})
"""Types of results that are complete when they are returned. They are checked before a call of `follow`,
which is slower."""
Ended: TypeAlias = Callable[[object], None]
Coroutine: TypeAlias = "CoroutineType[Any, Any, Any]"


def _references_of_one_holder() -> int:
    class Follower:
        def count(self, result: object) -> int:
            return sys.getrefcount(result)

    result = object()
    return Follower().count(result)


_ONE_HOLDER = _references_of_one_holder()


def is_exclusive(references: int) -> bool:
    """Return whether only the caller of a method has a reference to an object.

    Args:
        references: The object's reference count within the method.
    """
    return references <= _ONE_HOLDER


class Begun:
    """An `Unbegun` whose coroutine has begun.

    This class has no `__del__`, because Python would ignore an exception that a signal handler raises there.
    """


class Unbegun(Begun):
    """A coroutine that has not begun. If its replacement is dropped, this object closes the coroutine, so
    that Python warns only once.
    """

    def __init__(self, coroutine: Coroutine, dropped: Callable[[], None]) -> None:
        """
        Args:
            dropped: Called if the coroutine is dropped before it has begun.
        """
        self._coroutine: Coroutine | None = coroutine
        self._dropped = dropped

    def begin(self) -> Coroutine:
        """Mark the coroutine as begun, and return it."""
        coroutine, self._coroutine = self._coroutine, None
        self.__class__ = Begun  # type: ignore[assignment]
        return cast(Coroutine, coroutine)

    def stand_in(self, made: Any) -> object:
        """Set the name of this coroutine on `made`, the coroutine that awaits it. Return `made`."""
        coroutine = cast(Coroutine, self._coroutine)
        made.__name__, made.__qualname__ = coroutine.__name__, coroutine.__qualname__
        return made

    def __del__(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()
            self._dropped()


def unbegun(result: object, is_exclusive: bool, dropped: Callable[[], None]) -> Unbegun | None:
    """If `result` is a coroutine that may be replaced, return an `Unbegun` for it, else None."""
    if not (is_exclusive and isinstance(result, CoroutineType)):
        return None
    return Unbegun(result, dropped) if inspect.getcoroutinestate(result) == inspect.CORO_CREATED else None


def follow(result: object, scope: Scope, is_exclusive: bool, ended: Ended | None = None) -> object:
    """If `result` is a coroutine or future that continues the work, make `scope` end with `result`. Return
    the object that the user gets instead of `result`. Return None if `scope` ends now, because `result` is
    complete or is a coroutine that cannot be replaced.

    Args:
        ended: Called within the scope with the final result of the coroutine or future. It must not raise.
    """
    held = unbegun(result, is_exclusive, lambda: scope._ended(None))
    if held is not None:
        scope.hand_on()
        return held.stand_in(_to_its_end(held, scope, ended))
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and isinstance(result, asyncio.Future) and not result.done():
        scope.hand_on()
        result.add_done_callback(lambda future: _end_with(future, scope, ended))
        return result
    return None


async def _to_its_end(held: Unbegun, scope: Scope, ended: Ended | None) -> object:
    before = current.get()
    try:
        if scope is not OFF:
            current.set(scope)
        result: object = await held.begin()
        if ended is not None:
            ended(result)
        _return_to(before, scope)
        scope._ended(None)
    except BaseException as error:
        _return_to(before, scope)
        scope._ended(error)
        raise
    return result


def _return_to(before: Scope | None, scope: Scope) -> None:
    if current.get() is scope:  # otherwise another task or thread has closed the coroutine
        current.set(before)


def _end_with(future: Future[object], scope: Scope, ended: Ended | None) -> None:
    # `exception()` would mark the error as retrieved, and asyncio would not log it.
    error = sys.modules["asyncio"].CancelledError() if future.cancelled() else future._exception
    try:
        if error is None and ended is not None:
            ended(future.result())
    except ours() as failure:
        failures.note("reading what a future results in", failure)
    finally:
        scope._ended(error)
