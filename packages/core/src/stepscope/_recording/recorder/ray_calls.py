"""Calls of Ray actors that have not returned, from Ray's state API (`ray[default]`, with a dashboard)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from stepscope.files.states import RayCall

MOST = 1000
"""Calls that are asked for."""
_TIMEOUT_S = 2
_ACTOR = slice(16, None)
"""A task's id ends with the id of its actor (Ray's `id.h`)."""
_NO_ACTOR = "f" * 24
"""Begin of the actor's id in a task that is none of an actor's: the driver's, or a plain task."""


def known_here(workers: bool) -> bool:
    """Return whether this process asks Ray for all: it is a driver, or an actor that has workers."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return workers or getattr(ray.get_runtime_context().worker, "mode", None) == ray.SCRIPT_MODE


def open_calls() -> tuple[RayCall, ...]:
    """Return the calls of this job's actors that have not returned, the oldest first.

    Raises:
        Exception: Ray has no dashboard, or it does not answer.
    """
    context = sys.modules["ray"].get_runtime_context()
    state: Any = import_module("ray.util.state")
    tasks = state.list_tasks(
        address=context.gcs_address,
        filters=[
            ("job_id", "=", context.get_job_id()),
            ("type", "=", "ACTOR_TASK"),
            ("state", "!=", "FINISHED"),
            ("state", "!=", "FAILED"),
        ],
        limit=MOST,
        timeout=_TIMEOUT_S,
        detail=True,
        raise_on_missing_output=False,
    )
    return tuple(sorted(_calls(tasks), key=lambda call: -call.age_ns))


def _calls(tasks: list[Any]) -> Iterator[RayCall]:
    now_ms = time.time() * 1000
    for task in tasks:
        caller = task.parent_task_id[_ACTOR]
        since_ms = task.start_time_ms or task.creation_time_ms or now_ms
        yield RayCall(
            caller=None if caller.startswith(_NO_ACTOR) else caller,
            actor=task.actor_id or "",
            method=task.func_or_class_name,
            state=task.state,
            age_ns=max(0, round((now_ms - since_ms) * 1e6)),
            pid=task.worker_pid,
        )
