"""Calls of a capture that run in the processes of its Ray actors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from stepscope._recording import output
from stepscope._recording.fanout.messages import (
    PrepareAnswer,
    PrepareRequest,
    StartAnswer,
    StartRequest,
    StopRequest,
)
from stepscope._recording.fanout.worker_side import prepare_worker, start_worker, stop_worker
from stepscope._recording.process import failures
from stepscope._recording.spans import wrapping
from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError, ours
from stepscope.files.storage.atomic import boot_id

T = TypeVar("T")

_turn = threading.Lock()
"""Lock for preparing, starts and stops, because threaded and async actors run calls concurrently, in any
order."""


def start_here(instance: object, request: StartRequest, expires_ns: int) -> tuple[StartAnswer, str | None]:
    """Open the capture in this process.

    Args:
        expires_ns: Time on this machine's wall clock after which the start must not happen.

    Returns:
        The answer, and the id of this machine's boot.

    Raises:
        EngineError: the start has expired.
    """
    with _turn:
        if time.time_ns() > expires_ns:
            raise EngineError("start expired: the worker was still busy at the deadline")
        answer = start_worker(request, instance)
        renew_methods(instance)
        return answer, boot_id()


def prepare_here(instance: object, request: PrepareRequest) -> PrepareAnswer:
    with _turn:
        answer = prepare_worker(request, instance)
        renew_methods(instance)
        return answer


def renew_methods(instance: object) -> None:
    """Let calls from other processes reach methods that were instrumented after the actor was made.

    Ray (2.60: `FunctionActorManager.load_actor_class`) keeps the functions that the class had when the actor
    was made, each in a closure, and never reads the class again.
    """
    try:
        import ray

        manager: Any = ray._private.worker.global_worker.function_actor_manager
        for info in list(manager._function_execution_info.values()):
            method = getattr(info.function, "method", None)
            now = getattr(type(instance), getattr(info.function, "name", ""), None)
            if method is now or not wrapping.is_replacement(now):
                continue
            cells = dict(zip(info.function.__code__.co_freevars, info.function.__closure__, strict=True))
            cells["method"].cell_contents = info.function.method = now
    except ours() as error:
        failures.note("instrumenting the methods that Ray calls (`stepscope run` does so earlier)", error)


def stop_here(instance: object, request: StopRequest) -> tuple[bool, int]:
    """Close the capture in this process. Return whether it was open, and the id of the process."""
    with _turn:
        return stop_worker(request), os.getpid()


async def drain_here(instance: object, timeout_s: float) -> list[str]:
    return await own_thread(output.exporter().drain, timeout_s)


def call_here(instance: object, fn: Callable[..., T], *args: object) -> T:
    """Call a function that does not use the actor's object."""
    return fn(*args)
