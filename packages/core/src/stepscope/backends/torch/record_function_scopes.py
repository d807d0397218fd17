"""`record_function` scopes that are open when a torch.profiler session ends.

torch would write the end of such a scope into freed memory (docs/torch-traps.md). So a scope that began in a
session is ended before the session stops, in the session's trace too. The scope's own end then does nothing.

Scopes of C++ (an operator, a backward pass) are not visible to Python, so they may be open while a session
stops. For asynchronous gloo operations, `unrecorded` prevents such scopes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from stepscope.errors import ours

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")
_NOTED = "_stepscope_noted"
"""Attribute of a scope that has an entry in `_open`."""
_UNRECORDED = "_stepscope_unrecorded"
"""Attribute that marks functions made by `unrecorded`."""
_open: dict[int, Callable[[], None]] = {}
"""{id of an open scope: function that ends the scope}. Whoever removes an entry calls its function."""
_ended = 0
"""The number of calls of `_end_all`. One writer: `_end_all`."""
_never_ending: list[object] = []
"""Scopes that were beginning while their session ended. They are kept for ever, because torch ends a scope
when it is garbage-collected, perhaps in the next session."""
_watching = threading.Lock()
_watched = False


class Mark(AbstractContextManager[None]):
    """Wrapper of a `_RecordFunctionFast`, the class in C that stepscope's ranges and compiled code use."""

    __slots__ = ("_scope",)

    def __init__(self, scope: AbstractContextManager[object]) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        ended = _ended
        self._scope.__enter__()
        _open[id(self)] = self._end
        if ended != _ended and _open.pop(id(self), None) is not None:
            _never_ending.append(self._scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _open.pop(id(self), None) is not None:
            self._end()

    def _end(self) -> None:
        self._scope.__exit__(None, None, None)


def watch() -> None:
    """Make every torch.profiler session of this process end its open scopes before it stops.

    Scopes of a session that was dropped without a stop end before the next session begins. This adds about
    0.5 us to a scope's 15 us. Imports torch.
    """
    global _watched
    with _watching:
        if not _watched:
            _watch_scopes()
            _watch_sessions()
            _watched = True


def unrecorded(begin: Callable[P, T], when: Callable[..., bool] | None = None) -> Callable[P, T]:
    """Return a wrapper of `begin` whose operators are not recorded by any session.

    `begin` begins an asynchronous gloo operation. The scope of the operation would end when the program
    waits for the operation or drops it, perhaps in a later session. Imports torch.

    Args:
        when: Called with the arguments of each call; returns True if the call must not be recorded. By
            default, no call is recorded.

    Returns:
        The wrapper, or `begin` itself if `begin` is already a wrapper.
    """
    from torch.autograd import _enable_record_function, profiler  # type: ignore[attr-defined]  # not typed

    if is_unrecorded(begin):
        return begin

    @wraps(begin)
    def begin_unrecorded(*args: P.args, **kwargs: P.kwargs) -> T:
        if not profiler._is_profiler_enabled or not (when is None or when(*args, **kwargs)):
            return begin(*args, **kwargs)
        _enable_record_function(False)
        try:
            return begin(*args, **kwargs)
        finally:
            _enable_record_function(True)

    setattr(begin_unrecorded, _UNRECORDED, True)
    return begin_unrecorded


def is_unrecorded(begin: Callable[..., object]) -> bool:
    """Return whether `begin` is a wrapper made by `unrecorded`."""
    return hasattr(begin, _UNRECORDED)


def forget() -> None:
    """Drop all scopes in a forked child, because they belong to the parent."""
    _open.clear()


def _watch_scopes() -> None:
    from torch._C import _profiler
    from torch.autograd import profiler
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__

    @wraps(enter)  # with `wraps`, TorchScript compiles the original methods
    def entered(self: record_function) -> record_function:
        ended = _ended
        enter(self)  # type: ignore[no-untyped-call]  # torch
        if profiler._is_profiler_enabled or ended != _ended:
            _open[id(self)] = lambda: leave(self, None, None, None)
            vars(self)[_NOTED] = True
            if ended != _ended and _open.pop(id(self), None) is not None:
                _never_ending.append(self.record)
        return self

    @wraps(leave)
    def left(self: record_function, *raised: object) -> None:
        if vars(self).pop(_NOTED, False) and _open.pop(id(self), None) is None:
            return  # `_end_all` has ended the scope, or is ending it now
        leave(self, *raised)

    record_function.__enter__ = entered  # type: ignore[method-assign]
    record_function.__exit__ = left  # type: ignore[method-assign]
    fast = getattr(_profiler, "_RecordFunctionFast", None)
    if fast is None:
        return

    @wraps(fast)
    def noted(*args: object, **kwargs: object) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = fast(*args, **kwargs)
        return Mark(scope) if profiler._is_profiler_enabled else scope

    setattr(_profiler, "_RecordFunctionFast", noted)  # noqa: B010  # mypy: `_RecordFunctionFast` is a class


def _watch_sessions() -> None:
    """Patch the innermost Python functions that start and stop a session, because scopes may open until these
    functions run.
    """
    from torch.autograd import profiler

    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        setattr(profiler, name, _scopes_first(getattr(profiler, name)))


def _scopes_first(step: Callable[..., T]) -> Callable[..., T]:
    @wraps(step)
    def scopes_first(*args: object, **kwargs: object) -> T:
        _end_all()
        return step(*args, **kwargs)

    return scopes_first


def _end_all() -> None:
    global _ended
    _ended += 1
    while _open:
        try:
            _, end = _open.popitem()  # innermost scope first
        except KeyError:
            return  # another thread ended the last scope
        try:
            end()
        except ours():  # an active dispatch mode may raise; the session must stop anyway
            pass
