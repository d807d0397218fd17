"""torch.profiler sessions that are not ours: the user's own, an engine's, a framework's.

torch shows a running session to its own thread, and by a flag of `torch.autograd.profiler` to the others. It
does not show a session that is warming up, and starting a second one beside it segfaults when the first one
stops. So the ways into a session are watched: `torch.autograd.profiler.profile._prepare_trace`, and, for
`emit_nvtx`, `emit_itt` and `profiler_legacy`, which torch refuses beside a session, what enables a profiler.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

_sessions: WeakSet[profile] = WeakSet()
"""Sessions of others that were prepared. One writer: the method watched."""
_ours_on: int | None = None
"""The thread that is preparing or starting a session of ours. One writer: `ours`."""


def watch(before_theirs: Callable[[], None]) -> None:
    """Calls `before_theirs()` on the thread that is about to open a session which is not ours. What it
    raises, the user's start raises.

    To be called once per process. Takes tens of ms: one pass over all objects, for sessions already open.
    """
    from torch.autograd import profiler, profiler_legacy
    from torch.autograd.profiler import profile

    prepare = profile._prepare_trace

    def _prepare_trace(self: profile) -> None:
        if threading.get_ident() != _ours_on:
            before_theirs()
            _sessions.add(self)
        prepare(self)  # type: ignore[no-untyped-call]  # torch

    def watch_enabling(module: ModuleType, name: str) -> None:
        enable: Callable[..., None] = getattr(module, name)

        @wraps(enable)
        def _enable(*args: object, **kwargs: object) -> None:
            if threading.get_ident() != _ours_on:
                before_theirs()
            enable(*args, **kwargs)

        setattr(module, name, _enable)

    profile._prepare_trace = _prepare_trace  # type: ignore[method-assign]
    watch_enabling(profiler, "_enable_profiler")
    watch_enabling(profiler_legacy, "_enable_profiler_legacy")
    _sessions.update(live for live in gc.get_objects() if type(live) is profile)


@contextmanager
def ours() -> Iterator[None]:
    """Around preparing, and starting, a session of ours. One at a time: the process lock is held."""
    global _ours_on
    _ours_on = threading.get_ident()
    try:
        yield
    finally:
        _ours_on = None


def busy() -> str | None:
    """What of others profiles this process, or is about to; None when nothing does."""
    if any(live.enabled and live.entered and live.kineto_results is None for live in list(_sessions)):
        return "a torch.profiler session that is not stepscope's is open (running or warming up)"
    if running(on_this_thread=True) or running(on_this_thread=False):
        return "a torch.profiler session that is not stepscope's is running, or was dropped without stop()"
    return None


def running(on_this_thread: bool) -> bool:
    """Whether a session is running. Stopping one that is gone segfaults.

    Args:
        on_this_thread: One that records the calling thread; else any in this process.
    """
    from torch._C._autograd import _profiler_enabled
    from torch.autograd import profiler

    return _profiler_enabled() if on_this_thread else profiler._is_profiler_enabled


def clear_flag() -> None:
    """After a start of ours that failed: torch sets its flag before it starts, and leaves it set."""
    from torch.autograd import profiler

    profiler._set_is_profiler_enabled(False)


def forget() -> None:
    """In the child of a fork, on its only thread: the session of ours that torch shows is the parent's, and
    with `profile_memory` would take some 150 bytes for each allocation.

    To stop it would be to touch Kineto, and CUPTI. The old profiler's end takes it off the thread and does no
    more, whichever of both profilers began it.
    """
    from torch._C import _autograd

    if running(on_this_thread=True):
        nothing_else = _autograd._ProfilerDisableOptions(True, False)  # type: ignore[attr-defined]  # torch
        _autograd._disable_profiler_legacy(nothing_else)  # type: ignore[call-arg]  # its stub
    clear_flag()
