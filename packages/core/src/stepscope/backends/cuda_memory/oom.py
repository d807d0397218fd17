"""Observer of CUDA's out-of-memory errors, and the allocator's history between captures.

torch calls an observer on the thread that asked for memory, before it raises, and cannot detach one. So this
module attaches one observer per process, which calls the taker that is set at that moment.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from stepscope.errors import ours

POLL_S = 0.5
"""Interval between two checks for CUDA. Attaching earlier would create a CUDA context."""


class Shortage(NamedTuple):
    """Arguments that torch passes to its observer when memory runs out."""

    device: int
    asked_bytes: int
    limit_bytes: int
    free_bytes: int


_attached = False
_window: Callable[[Any], None] | None = None
"""Function of the open `cuda_memory` window that gets the snapshot first, or None. Set by `in_window`."""
_between: Callable[[Shortage, Callable[[], Any], bool], None] | None = None
"""Function that gets out-of-memory errors outside of windows, or None. Set by `watch`."""
_refused: Callable[[str], None] | None = None
"""Function that gets the reason why no snapshot can be taken, or None. Set by `watch`."""
_history: dict[str, object] | None = None
"""Options of the history between windows, or None for no history. Set by `watch`."""
_running = False
"""True while the history between windows is on."""
_waiting: threading.Thread | None = None
_lock = threading.Lock()


def attach() -> str | None:
    """Attach the observer, once per process. Return the reason if that is not possible, else None."""
    global _attached
    import torch

    call = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if call is None:
        return f"torch {torch.__version__} has no observer of out-of-memory errors"
    if not _attached:
        try:
            call(_out_of_memory)
        except ours(RuntimeError) as error:  # cudaMallocAsync and pluggable allocators have none
            return f"this allocator does not report out-of-memory errors: {str(error).splitlines()[0]}"
        _attached = True
    return None


def in_window(taker: Callable[[Any], None] | None) -> None:
    """Set the taker of snapshots for the window that records; None ends it."""
    global _window
    _window = taker


def watch(
    taker: Callable[[Shortage, Callable[[], Any], bool], None],
    history: dict[str, object] | None,
    refused: Callable[[str], None],
) -> None:
    """Call `taker(shortage, take a snapshot, with history)` at each shortage outside windows, from now on.

    If the process does not use CUDA yet, a thread waits until it does.

    Args:
        refused: Called with the reason if the observer cannot be attached, perhaps on that thread.
        history: Options of `torch.cuda.memory._record_memory_history`, which then is on between windows.
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
    cuda = getattr(torch, "cuda", None)  # None while torch is being imported
    return cuda is not None and bool(cuda.is_initialized())


def suspend() -> None:
    """End the history between windows, because a window is about to record its own."""
    global _running
    if _running:
        import torch

        torch.cuda.memory._record_memory_history(None)
        _running = False


def resume() -> None:
    """Begin the history between windows again, if it is wanted and no other code records one."""
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
    """Pass a shortage to the taker. torch calls this before it raises; the user's error must come through."""
    window, between = _window, _between
    if window is None and between is None:
        return
    try:
        if window is not None:
            window(_snapshot())
        elif between is not None:
            between(Shortage(device, asked, limit, free), _snapshot, _running)
    except BaseException:  # noqa: S110  # torch would raise this one in place of its own
        pass


def _in_child() -> None:
    # CUDA does not survive a fork, and neither does the thread.
    global _waiting, _running, _window, _between, _history, _refused
    _waiting, _running, _window, _between, _history, _refused = None, False, None, None, None, None


os.register_at_fork(after_in_child=_in_child)
