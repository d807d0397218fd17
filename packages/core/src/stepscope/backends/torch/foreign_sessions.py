"""torch.profiler sessions of other code: the user's own, an engine's, a framework's.

torch does not show a session that is warming up (docs/torch-traps.md). So this module watches every entry
into a session. These are `torch.autograd.profiler.profile._prepare_trace`, and the functions that enable a
profiler for `emit_nvtx`, `emit_itt` and `profiler_legacy`, which torch refuses beside a session.
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
"""Prepared sessions of other code. One writer: the watched method."""
_ours_on: int | None = None
"""The thread that is preparing or starting a session of stepscope. One writer: `ours`."""


def watch(before_theirs: Callable[[], None]) -> None:
    """From now on, call `before_theirs()` on each thread of other code that is about to open a session.

    If it raises, the start of that session raises. Call `watch` once per process. It takes tens of ms: one
    pass over all objects, for sessions that are open already.
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
    _sessions.update(session for session in gc.get_objects() if type(session) is profile)


@contextmanager
def ours() -> Iterator[None]:
    """Mark the sessions prepared or started inside as stepscope's. The caller holds the process lock."""
    global _ours_on
    _ours_on = threading.get_ident()
    try:
        yield
    finally:
        _ours_on = None


def busy() -> str | None:
    """Return the name of the open, or starting, session of other code; None if there is none."""
    if any(other.enabled and other.entered and other.kineto_results is None for other in list(_sessions)):
        return "a torch.profiler session that is not stepscope's is open (running or warming up)"
    if running(on_this_thread=True) or running(on_this_thread=False):
        return "a torch.profiler session that is not stepscope's is running, or was dropped without stop()"
    return None


def running(on_this_thread: bool) -> bool:
    """Return whether a session is running. Stopping one that is gone segfaults.

    Args:
        on_this_thread: Ask for a session that records the calling thread; else for any in this process.
    """
    from torch._C._autograd import _profiler_enabled
    from torch.autograd import profiler

    return _profiler_enabled() if on_this_thread else profiler._is_profiler_enabled


def clear_flag() -> None:
    """Clear the flag that torch sets before a start and does not clear if the start fails."""
    from torch.autograd import profiler

    profiler._set_is_profiler_enabled(False)


def forget() -> None:
    """Detach the session of the parent from the only thread of a forked child.

    With `profile_memory`, the session would take about 150 bytes for each allocation. A stop would touch
    Kineto and CUPTI. The end of the legacy profiler detaches a session of either profiler and does no more.
    """
    from torch._C import _autograd

    if running(on_this_thread=True):
        nothing_else = _autograd._ProfilerDisableOptions(True, False)  # type: ignore[attr-defined]  # torch
        _autograd._disable_profiler_legacy(nothing_else)  # type: ignore[call-arg]  # its stub
    clear_flag()
