"""Types of the workers and engines that `capture` and `prepare` take. Only type checkers import them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from stepscope.engines.protocol import EngineProfiler


class WorkerHandle(Protocol):
    """A handle to a worker in another process: what `Class.remote(...)` of Ray returns."""

    @property
    def _actor_id(self) -> object: ...


class HasWorkers(Protocol):
    """A worker group that keeps its handles, such as verl's `RayWorkerGroup`."""

    @property
    def workers(self) -> Sequence[WorkerHandle] | Mapping[int, WorkerHandle]: ...


class HasActors(Protocol):
    """A manager that keeps its handles, such as RLlib's `FaultTolerantActorManager`."""

    @property
    def _actors(self) -> Sequence[WorkerHandle] | Mapping[int, WorkerHandle]: ...


WorkerGroup: TypeAlias = (
    WorkerHandle | Sequence[WorkerHandle] | Mapping[int, WorkerHandle] | HasWorkers | HasActors
)
"""Workers of one role: a handle, handles in rank order, {number: handle}, or an object that keeps handles."""
Workers: TypeAlias = WorkerGroup | Mapping[str, object]
"""Workers of one role, or {role: workers}. mypy reads `{"a": [x], "b": x}` as a mapping to objects."""
Engines: TypeAlias = EngineProfiler | str | Sequence[object] | object
"""One engine of an installed adapter, its profiler, an adapter's name, or several of these in replica
order."""
