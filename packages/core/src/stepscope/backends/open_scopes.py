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
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from torch.autograd.profiler import profile

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
    open in it before it stops. Costs a scope 0.3 us. Imports torch.
    """
    global _watched
    with _watching:
        if _watched:
            return
        _watched = True
        _watch_scopes()
        _watch_stops()


def _watch_scopes() -> None:
    from torch.autograd import profiler
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__

    @wraps(enter)  # TorchScript compiles both from the source that it finds
    def entered(self: record_function) -> record_function:
        enter(self)  # type: ignore[no-untyped-call]  # torch
        if profiler._is_profiler_enabled:
            _open[id(self)] = lambda: end_early(self)
        return self

    @wraps(leave)
    def left(self: record_function, *raised: object) -> None:
        _open.pop(id(self), None)
        leave(self, *raised)

    def end_early(scope: record_function) -> None:
        leave(scope, None, None, None)
        scope.run_callbacks_on_exit = False

    record_function.__enter__ = entered  # type: ignore[method-assign]
    record_function.__exit__ = left  # type: ignore[method-assign]


def _watch_stops() -> None:
    from torch.autograd.profiler import profile

    stop = profile.__exit__

    @wraps(stop)
    def stopped(self: profile, *raised: object) -> object:
        _end_all()
        return stop(self, *raised)  # type: ignore[no-untyped-call]  # torch

    profile.__exit__ = stopped  # type: ignore[method-assign]


def _end_all() -> None:
    while _open:
        try:
            _, end = _open.popitem()  # the innermost first
        except KeyError:
            return  # it ended on its own thread
        end()
