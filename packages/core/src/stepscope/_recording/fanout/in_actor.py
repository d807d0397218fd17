"""Calls of a capture that run in the processes of its Ray actors."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from stepscope._recording import output
from stepscope._recording.fanout.messages import (
    PrepareAnswer,
    PrepareRequest,
    StartAnswer,
    StartRequest,
    StopRequest,
    WorkerRequest,
)
from stepscope._recording.fanout.worker_side import prepare_worker, start_worker, stop_worker
from stepscope._recording.process import failures
from stepscope._recording.spans import wrapping
from stepscope.config import ProfileConfig
from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError, ours
from stepscope.files.storage.atomic import boot_id

T = TypeVar("T")

_turn = threading.Lock()
"""Lock for preparing, starts and stops, because threaded and async actors run calls concurrently, in any
order."""


class Sent:
    """A request on its way: the worker gets `request` itself.

    Its configuration is pickled once for all workers, and a worker reads it once for all requests: reading
    it checks it, which takes longer than all else in a request.
    """

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self.request, name) for name in self.request.__struct_fields__}
        return _received, (type(self.request), {**fields, "config": _pickled(self.request.config)})


_sent: tuple[ProfileConfig, bytes] | None = None
"""The configuration that was sent last, and its pickle. One writer: `_pickled`."""
_read = lru_cache(maxsize=4)(pickle.loads)


def _pickled(config: ProfileConfig) -> bytes:
    global _sent
    sent = _sent
    if sent is None or sent[0] is not config:
        sent = _sent = (config, pickle.dumps(config))
    return sent[1]


def _received(kind: type[WorkerRequest], fields: dict[str, Any]) -> WorkerRequest:
    return kind(**{**fields, "config": _read(fields["config"])})


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
