"""`record_function` scopes that are open when a torch.profiler session ends.

torch writes the end of a scope into the session in which it began, and frees that session at its stop. Where
another session runs by then (the next cycle of a schedule, the next capture), it writes into freed memory: a
segmentation fault within some tens of sessions, at a place that has nothing to do with it. So a scope that
began in a session ends with it, in its trace too, and its own end does nothing more.

Scopes of C++ (an operator, a backward pass) that are open while Python stops one session and starts the next
cannot be seen from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")
_NOTED = "_stepscope_noted"
"""In the dict of a scope that is, or was, in `_open`."""
_open: dict[int, Callable[[], None]] = {}
"""How to end each. Whoever takes one out ends it."""
_watching = threading.Lock()
_watched = False


class Mark(AbstractContextManager[None]):
    """A scope by a class that is not watched (`_RecordFunctionFast`, which is written in C)."""

    __slots__ = ("_scope",)

    def __init__(self, scope: AbstractContextManager[object]) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self._scope.__enter__()
        _open[id(self)] = self._end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _open.pop(id(self), None) is not None:
            self._end()

    def _end(self) -> None:
        self._scope.__exit__(None, None, None)


def watch() -> None:
    """From now on each torch.profiler session of this process, whoever opened it, ends the scopes that are
    open in it before it stops, or before the next one begins where it was dropped. Costs a scope some 0.5 us
    of 15. Imports torch.
    """
    global _watched
    with _watching:
        if not _watched:
            _watch_scopes()
            _watch_sessions()
            _watched = True


def forget() -> None:
    """In the child of a fork, where the scopes are the parent's."""
    _open.clear()


def _watch_scopes() -> None:
    from torch.autograd import profiler
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__

    @wraps(enter)  # TorchScript compiles both from the source that it finds
    def entered(self: record_function) -> record_function:
        enter(self)  # type: ignore[no-untyped-call]  # torch
        if profiler._is_profiler_enabled:
            _open[id(self)] = lambda: leave(self, None, None, None)
            vars(self)[_NOTED] = True
        return self

    @wraps(leave)
    def left(self: record_function, *raised: object) -> None:
        if vars(self).pop(_NOTED, False) and _open.pop(id(self), None) is None:
            return  # it was ended with its session, or is this very moment
        leave(self, *raised)

    record_function.__enter__ = entered  # type: ignore[method-assign]
    record_function.__exit__ = left  # type: ignore[method-assign]


def _watch_sessions() -> None:
    """Where torch's Python hands over to C++: whatever comes before that, scopes may still open."""
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
    while _open:
        try:
            _, end = _open.popitem()  # the innermost first
        except KeyError:
            return  # it ended on its own thread
        with suppress(Exception):  # of a mode that takes operators over, say: the session has to stop
            end()
