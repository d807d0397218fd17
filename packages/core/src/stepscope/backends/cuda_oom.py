"""An observer of CUDA's out-of-memory errors, and the allocator's history between windows.

torch calls an observer on the thread that requested memory, before torch raises. An observer cannot be
detached. So this module attaches one observer per process, which calls the function that is set at that
moment.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from stepscope.errors import ours

POLL_S = 0.5
"""Interval of checks whether the process uses CUDA. The observer is attached only then, because attaching
creates a CUDA context."""


class Shortage(NamedTuple):
    """The arguments that torch passes to an observer."""

    device: int
    asked_bytes: int
    limit_bytes: int
    free_bytes: int


_attached = False
_window: Callable[[Any], None] | None = None
"""Function that is called with a snapshot at each out-of-memory error in a `cuda_memory` window, in place of
`_between`; None between windows. Set by `in_window`."""
_between: Callable[[Shortage, Callable[[], Any], bool], None] | None = None
"""Function that is called for out-of-memory errors between windows, or None. Set by `watch`."""
_refused: Callable[[str], None] | None = None
"""Function that is called with the reason if the observer cannot be attached, or None. Set by `watch`."""
_history: dict[str, object] | None = None
"""Options of the history between windows, or None if there is none. Set by `watch`."""
_running = False
"""True while the history between windows is on."""
_waiting: threading.Thread | None = None
_lock = threading.Lock()


def attach() -> str | None:
    """Attach the observer, once per process. Return None, or the reason if torch has no observer."""
    global _attached
    import torch

    call = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if call is None:
        return f"torch {torch.__version__} has no observer of out-of-memory errors"
    if not _attached:
        try:
            call(_out_of_memory)
        except ours(RuntimeError) as error:  # cudaMallocAsync and pluggable allocators have no observers
            return f"this allocator does not report out-of-memory errors: {str(error).splitlines()[0]}"
        _attached = True
    return None


def in_window(taker: Callable[[Any], None] | None) -> None:
    """From now on, call `taker(snapshot)` at each out-of-memory error. None ends this."""
    global _window
    _window = taker


def watch(
    taker: Callable[[Shortage, Callable[[], Any], bool], None],
    history: dict[str, object] | None,
    refused: Callable[[str], None],
) -> None:
    """Call `taker(shortage, snapshot, has_history)` at each out-of-memory error between windows, from now on.

    `snapshot` is a function that takes a snapshot. If the process does not use CUDA yet, a thread waits until
    it does.

    Args:
        refused: Called with the reason if the observer cannot be attached, on this thread or on the waiting
            thread.
        history: Options of `torch.cuda.memory._record_memory_history`, to record a history between windows;
            None to record none.
    """
    global _between, _history, _refused, _waiting
    _between, _history, _refused = taker, history, refused
    with _lock:
        if _waiting is not None:
            return
        if uses_cuda():
            _begin()
            return
        _waiting = threading.Thread(target=_wait, name="stepscope-oom", daemon=True)
        _waiting.start()


def unwatch() -> None:
    global _between, _history, _refused
    suspend()
    _between = _history = _refused = None


def uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # the attribute is absent while torch is being imported
    return cuda is not None and bool(cuda.is_initialized())


def suspend() -> None:
    """End the history between windows, because a window is about to begin its own."""
    global _running
    if _running:
        import torch

        torch.cuda.memory._record_memory_history(None)
        _running = False


def resume() -> None:
    """Begin the history between windows again, if `watch` got options for it and no other code records a
    history.
    """
    global _running
    if _history is None or _running or not _attached:
        return
    import torch

    if not torch._C._cuda_isHistoryEnabled():
        options: Any = _history
        torch.cuda.memory._record_memory_history(**options)
        _running = True


def _wait() -> None:
    global _waiting
    never = threading.Event()
    while _between is not None and not uses_cuda():
        never.wait(POLL_S)
    with _lock:
        _waiting = None
        if _between is not None:
            _begin()


def _begin() -> None:
    try:
        reason = attach()
        if reason is None and _window is None:
            resume()
    except ours() as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None and _refused is not None:
        _refused(reason)


def _snapshot() -> object:
    import torch

    try:
        return torch.cuda.memory._snapshot()
    except ours():
        return {"error": "the snapshot failed: there was no memory for it"}


def _out_of_memory(device: int, asked: int, limit: int, free: int) -> None:
    """Observe an out-of-memory error. torch calls this function before it raises the error."""
    window, between = _window, _between
    if window is None and between is None:
        return
    try:
        if window is not None:
            window(_snapshot())
        elif between is not None:
            between(Shortage(device, asked, limit, free), _snapshot, _running)
    except BaseException:  # noqa: S110  # torch would raise this exception in place of its own
        pass


def _in_child() -> None:
    # A forked child has neither the CUDA context nor the waiting thread.
    global _waiting, _running, _window, _between, _history, _refused
    _waiting, _running, _window, _between, _history, _refused = None, False, None, None, None, None


os.register_at_fork(after_in_child=_in_child)
