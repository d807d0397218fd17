"""Captures sent to Ray actors, whose classes need no change.

All workers are called at once, each with its own deadline. A start expires at the deadline on the worker's
clock, so that a busy worker does not start late. The first call only reads that clock, unless the worker is
known to be on this machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from stepscope._recording.fanout.fetch import Home
from stepscope._recording.fanout.messages import PrepareRequest, StartRequest, StopRequest, WorkerOutcome
from stepscope._recording.fanout.ray_worker import Worker
from stepscope.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_LISTS = ("workers", "_workers", "actors", "_actors")
"""Attributes in which worker groups keep their handles: `workers` in verl, `_actors` in RLlib's manager."""
_BY_ITS_ENGINE = "the profiler of the engine in it records this process"


def load_fleet(workers: object, engine_workers: Mapping[int, Sequence[object]] | None = None) -> RayFleet:
    """Return the fleet of `workers`.

    Args:
        workers: The argument of `capture(workers=)`, or None.
        engine_workers: {replica: workers that an engine's own profiler records}. These record only spans.

    Raises:
        ConfigError: these are no workers.
    """
    fleet = fleet_of(workers, engine_workers or {})
    if fleet is not None:
        return fleet
    if isinstance(workers, Mapping) and workers:
        role, group = next(iter(workers.items()))
        raise _not_workers(group, role)
    raise _not_workers(workers, None)


def fleet_of(
    workers: object, engine_workers: Mapping[int, Sequence[object]] | None = None
) -> RayFleet | None:
    """Return the fleet of `workers` and `engine_workers`, or None if these are not Ray's.

    Args:
        workers: An actor handle, a sequence of them in rank order, a {number: handle}, an object that keeps
            one of these in `workers`, or {role: any of these}; None for nothing. An actor that is given twice
            takes part once, at its first position.
        engine_workers: Actors that the profiler of an engine records, by replica. These record only spans,
            under their role in `workers`, else `rollout`.

    Raises:
        ConfigError: only some of a sequence are actor handles, or one is the actor that asks.
    """
    if "ray" not in sys.modules:
        return None
    groups: dict[object, object] = {} if workers is None else {None: workers}
    if isinstance(workers, Mapping) and not all(isinstance(key, int) for key in workers):
        groups = dict(workers)
    actors = {role: _handles(group) for role, group in groups.items()}
    if not any(actors.values()) and groups:
        return None
    members: dict[str, Worker] = {}
    for role, handles in actors.items():
        if not handles:
            raise _not_workers(groups[role], role)
        for position, handle in enumerate(handles):
            worker = Worker(handle, None if role is None else str(role), position, len(handles))
            members.setdefault(worker.actor_id, worker)
    engines = [
        (replica, handle)
        for replica, group in (engine_workers or {}).items()
        for handle in _handles(group) or ()
    ]
    for position, (replica, handle) in enumerate(engines):
        worker = Worker(handle, "rollout", position, len(engines))
        worker = members.setdefault(worker.actor_id, worker)
        worker.replica, worker.spans_only = replica, _BY_ITS_ENGINE
    _refuse_oneself(members)
    return RayFleet(list(members.values()))


class RayFleet:
    """The Ray actors of one capture."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    async def prepare(self, request: PrepareRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Pay the profiler's one-off costs on all workers at once; `failed` where it cannot work."""
        return await asyncio.gather(*(worker.prepare(request, deadline_s) for worker in self.workers))

    async def start(self, request: StartRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Open the capture on all workers at once. Return their outcomes; a worker's failure never raises.

        If this is cancelled, workers that were asked to start are stopped before the cancellation is raised.
        """
        try:
            return await asyncio.gather(*(worker.start(request, deadline_s) for worker in self.workers))
        except BaseException:
            for worker in self.workers:
                worker.take_back(request.capture_id, "opening the capture was given up")
                worker.in_doubt = True
            raise

    async def stop(self, request: StopRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Close the capture at once on all workers that began, or may have begun. Return their outcomes."""
        asked = [worker for worker in self.workers if worker.begun is not None or worker.in_doubt]
        return await asyncio.gather(*(worker.stop(request, deadline_s) for worker in asked))

    async def drain(self, timeout_s: float) -> list[WorkerOutcome]:
        """Wait until the workers have written their files. An outcome is `failed`, with the unfinished files,
        at the deadline.
        """
        begun = [worker for worker in self.workers if worker.begun is not None]
        return await asyncio.gather(*(worker.drain(timeout_s) for worker in begun))

    async def gather(
        self, capture_id: str, engine_files: dict[str, list[str]], home: Home, left_s: Callable[[], float]
    ) -> list[WorkerOutcome]:
        """Fetch the files of the workers that are apart, until `left_s` returns 0. Return their outcomes.

        Args:
            engine_files: {host: paths in the step's folder} of files that engines wrote there.
        """
        apart = [worker for worker in self.workers if worker.begun is not None and worker.begun.apart]
        files = dict(engine_files)  # the first worker on an engine's host also sends the engine's files
        asked = [(worker, files.pop(worker.host, [])) for worker in apart]
        return await asyncio.gather(
            *(worker.gather(capture_id, named, home, left_s) for worker, named in asked)
        )

    def release(self, capture_id: str) -> None:
        """Tell the workers, without waiting, that all files of the capture are here, so that they need not
        keep them.
        """
        for worker in self.workers:
            if worker.begun is not None and worker.begun.apart:
                worker.release(capture_id)


def _handles(group: object) -> list[ActorHandle[Any]] | None:
    """Return the actor handles in `group`, in order, or None if it is something else."""
    from ray.actor import ActorHandle

    if isinstance(group, ActorHandle):
        return [group]
    if isinstance(group, Mapping):  # RLlib: {1: handle, 2: handle}
        group = list(group.values())
    if isinstance(group, str) or not isinstance(group, Sequence):
        lists = (getattr(group, name, None) for name in _LISTS)
        return next((_handles(member) for member in lists if isinstance(member, Sequence | Mapping)), None)
    strange = [index for index, member in enumerate(group) if not isinstance(member, ActorHandle)]
    if strange and len(strange) < len(group):
        raise ConfigError(
            f"capture(workers=)[{strange[0]}]",
            group[strange[0]],
            "a Ray actor handle, like the others",
            "pass what `Class.remote(...)` returned",
        )
    return None if strange else list(group)


def _refuse_oneself(members: Mapping[str, Worker]) -> None:
    import ray

    own = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if own is not None and own in members:
        raise ConfigError(
            "capture(workers=)",
            members[own].name,
            "other actors than the one that opens the capture: it would wait for itself",
            "leave it out; the process that opens a capture is always recorded",
        )


def _not_workers(group: object, role: object) -> ConfigError:
    """Return the error for a value that is not a worker, given as `capture(workers=group)` or {role:
    group}.
    """
    is_empty = group is None or (isinstance(group, Sized) and not len(group))
    item = group[0] if isinstance(group, Sequence) and group else group
    kind = type(item).__qualname__
    fix = "pass the Ray actor handles of the workers; pip install 'stepscope[ray]' if Ray is missing"
    if isinstance(item, type):
        kind, fix = item.__qualname__, f"pass what {item.__name__}.remote(...) returned, not the class"
    elif kind.startswith("ActorClass("):
        fix = f"pass what {kind[11:-1]}.remote(...) returned, not the class"
    elif is_empty:
        fix = "leave it out"
    return ConfigError(
        "capture(workers=)" if role is None else f"capture(workers=)[{role!r}]",
        group if is_empty or isinstance(group, str) else kind if item is group else f"a list of {kind}",
        "a Ray actor handle, a sequence of them in rank order, {number: handle}, or {role: any of these}",
        fix,
    )
