"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import sys
from typing import Any

from stepscope._recording.process import fork

_of_the_parent: object = None
"""Ray's worker object that this process inherited by a fork. One writer: `_forget`."""


def connected() -> Any:
    """Return the module `ray` if this process can query its cluster, else None.

    A forked child cannot: a query on the connection that it shares with its parent hangs, and so do the
    parent's own queries from then on.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    is_shared = _of_the_parent is not None and _worker(ray) is _of_the_parent
    return None if is_shared else ray


def waits_for_tasks() -> bool:
    """Return whether this process is a worker of Ray whose main thread, which calls this, runs no task."""
    ray = connected()
    if ray is None:
        return False
    context = ray.get_runtime_context()
    return context.worker.mode == ray.WORKER_MODE and context.get_task_id() is None


def _worker(ray: Any) -> object:
    return getattr(ray.get_runtime_context().worker, "core_worker", None)


def _forget() -> None:
    global _of_the_parent
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _of_the_parent = _worker(ray)


fork.forgets("connection to Ray", _forget)
