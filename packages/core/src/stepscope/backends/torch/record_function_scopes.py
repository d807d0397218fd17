"""`record_function` scopes that are open when a torch.profiler session ends.

torch would write the end of such a scope into freed memory (docs/torch-traps.md). So a scope that began in a
session ends with that session, in its trace too, and its own end then does nothing.

Python cannot see scopes of C++ (an operator, a backward pass) that are open while one session stops and the
next one starts. `unrecorded` keeps those of asynchronous gloo operations from beginning.
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
"""Marker attribute of a scope that is, or was, in `_open`."""
_UNRECORDED = "_stepscope_unrecorded"
"""Marker attribute of functions made by `unrecorded`."""
_open: dict[int, Callable[[], None]] = {}
"""{id of an open scope: function that ends it}. The code that removes a function calls it."""
_ended = 0
"""The number of times that all scopes were ended. One writer: `_end_all`."""
_never_ending: list[object] = []
"""Scopes whose session ended while they began. Kept for ever, because a dropped scope would end in the next
session."""
_watching = threading.Lock()
_watched = False


class Mark(AbstractContextManager[None]):
    """A scope of `_RecordFunctionFast`, a class in C: stepscope's ranges, and those of compiled code."""

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

    If a session was dropped without a stop, its scopes end before the next session begins. Costs about 0.5 us
    of a scope's 15. Imports torch.
    """
    global _watched
    with _watching:
        if not _watched:
            _watch_scopes()
            _watch_sessions()
            _watched = True


def unrecorded(begin: Callable[P, T], when: Callable[..., bool] | None = None) -> Callable[P, T]:
    """Return a `begin` whose operators no session records.

    For a function that begins an asynchronous gloo operation: its scope ends when the operation is waited for
    or dropped, perhaps in a later session. Imports torch.

    Args:
        when: Called with the arguments of each call. The call is unrecorded if it returns True. None leaves
            every call unrecorded.

    Returns:
        `begin` itself if it is unrecorded already.
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
    """Return whether `unrecorded` made this function."""
    return hasattr(begin, _UNRECORDED)


def forget() -> None:
    """Drop the scopes in the child of a fork: they belong to the parent."""
    _open.clear()


def _watch_scopes() -> None:
    from torch._C import _profiler
    from torch.autograd import profiler
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__

    @wraps(enter)  # TorchScript compiles both methods from the source of the wrapped ones
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
            return  # its session ended it, or is ending it now
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

    setattr(_profiler, "_RecordFunctionFast", noted)  # noqa: B010  # a class, to mypy


def _watch_sessions() -> None:
    """Patch the last Python functions before C++, because scopes may still open until these run."""
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
            _, end = _open.popitem()  # the innermost first
        except KeyError:
            return  # it ended on its own thread
        try:
            end()
        except ours():  # an active dispatch mode may raise, and the session has to stop
            pass
