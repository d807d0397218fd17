"""Functions that run in the processes of a capture's Ray actors."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from stepscope._recording.fanout.messages import (
    PrepareAnswer,
    PrepareRequest,
    StartAnswer,
    StartRequest,
    StopRequest,
    WorkerRequest,
)
from stepscope._recording.fanout.worker_side import prepare_worker, start_worker, stop_worker
from stepscope._recording.process import exports, failures
from stepscope._recording.spans import wrapping
from stepscope.config import ProfileConfig
from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError, ours
from stepscope.files.storage import boot_id

T = TypeVar("T")

_turn = threading.Lock()
"""Lock for prepare, start and stop, because threaded and async actors run calls concurrently."""


class Sent:
    """A wrapper in which a request is sent. Unpickling returns the request itself.

    The configuration is pickled once for all workers and unpickled once for all requests, because unpickling
    checks it, which takes longer than everything else.
    """

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self.request, name) for name in self.request.__struct_fields__}
        return _received, (type(self.request), {**fields, "config": _pickled(self.request.config)})


_sent: tuple[ProfileConfig, bytes] | None = None
"""(last configuration that was sent, its pickle), or None. One writer: `_pickled`."""
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
        expires_ns: Unix time in ns, on this machine's clock, after which the capture must not start.

    Returns:
        The answer, and `boot_id()` of this machine.

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
    """Make calls from other processes use methods that were instrumented after the actor was created.

    Ray (2.60: `FunctionActorManager.load_actor_class`) keeps the original functions of the class in closures
    and does not read the class again.
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
    """Close the capture in this process. Return (True if the capture was open, process id)."""
    with _turn:
        return stop_worker(request), os.getpid()


async def drain_here(instance: object, timeout_s: float) -> list[str]:
    return await own_thread(exports.exporter().drain, timeout_s)


def call_here(instance: object, fn: Callable[..., T], *args: object) -> T:
    """Call a function that does not use the actor's instance."""
    return fn(*args)
