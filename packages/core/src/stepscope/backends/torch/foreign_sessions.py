"""torch.profiler sessions of other code: of the user, an engine or a framework.

torch does not report a session that is warming up (docs/torch-traps.md). So this module wraps the functions
that open a session (`torch.autograd.profiler.profile._prepare_trace`), and the functions that enable
`emit_nvtx`, `emit_itt` and `profiler_legacy`. During a session, torch refuses to enable these three.
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
"""Sessions of other code. Writers: `watch`, and its wrapper of `_prepare_trace`."""
_ours_on: int | None = None
"""Id of the thread that is preparing or starting a session of stepscope, or None. One writer: `ours`."""


def watch(before_theirs: Callable[[], None]) -> None:
    """From now on, call `before_theirs()` before other code opens a session, on the thread that opens it.

    If `before_theirs` raises, the session does not start. Call `watch` once per process. The call takes tens
    of ms, because `watch` searches all objects for open sessions.
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
    """Mark sessions that are prepared or started in the block as stepscope's own. The caller holds the
    process lock.
    """
    global _ours_on
    _ours_on = threading.get_ident()
    try:
        yield
    finally:
        _ours_on = None


def busy() -> str | None:
    """Describe the session of other code that is open or warming up; None if there is none."""
    if any(other.enabled and other.entered and other.kineto_results is None for other in list(_sessions)):
        return "a torch.profiler session that is not stepscope's is open (running or warming up)"
    if running(on_this_thread=True) or running(on_this_thread=False):
        return "a torch.profiler session that is not stepscope's is running, or was dropped without stop()"
    return None


def running(on_this_thread: bool) -> bool:
    """Return whether a session is running. Call this before a stop, because stopping a session that has ended
    segfaults.

    Args:
        on_this_thread: True for a session of the calling thread, False for any session of this process.
    """
    from torch._C._autograd import _profiler_enabled
    from torch.autograd import profiler

    return _profiler_enabled() if on_this_thread else profiler._is_profiler_enabled


def clear_flag() -> None:
    """Clear torch's flag that a session is running. The flag stays set if a start fails."""
    from torch.autograd import profiler

    profiler._set_is_profiler_enabled(False)


def forget() -> None:
    """Detach the parent's session from the only thread of a forked child.

    The session would use about 150 bytes per allocation with `profile_memory`. An ordinary stop would call
    Kineto and CUPTI. The function that disables the legacy profiler detaches either kind of session and does
    nothing else.
    """
    from torch._C import _autograd

    if running(on_this_thread=True):
        nothing_else = _autograd._ProfilerDisableOptions(True, False)  # type: ignore[attr-defined]  # torch
        _autograd._disable_profiler_legacy(nothing_else)  # type: ignore[call-arg]  # torch: not in its stub
    clear_flag()
