"""Captures fanned out to Ray actors, whose classes stay as they are.

All workers are asked at once, and each has its own deadline. First it is asked whether it is there: one that
is busy past the deadline has then not been sent anything that could happen late. Its answer also says how its
clock stands, so the start that follows expires at the deadline as the worker's own clock shows it.

One file above 400 lines: both sides of each call stand in it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.engines.actor_call import ActorGoneError, ActorLine, present
from stepscope.engines.own_thread import own_thread
from stepscope.errors import ConfigError, EngineError
from stepscope.files.clock import ClockOffset
from stepscope.files.manifest.records import State
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.arrival import Arrival
from stepscope.files.storage.processes import boot_id
from stepscope.recording.fanout import fetch
from stepscope.recording.fanout.fetch import Home, Remote
from stepscope.recording.fanout.fleet import WorkerOutcome, not_workers
from stepscope.recording.fanout.messages import (
    GatherRequest,
    PrepareAnswer,
    PrepareRequest,
    StartAnswer,
    StartRequest,
    StopAnswer,
    StopRequest,
)
from stepscope.recording.fanout.worker_side import drain_worker, prepare_worker, start_worker, stop_worker
from stepscope.recording.process import failures
from stepscope.recording.process.clock import Estimate, Exchange, estimate_offset
from stepscope.recording.spans import wrapping

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_LISTS = ("workers", "_workers", "actors", "_actors")
"""Attributes in which worker groups keep their handles: `workers` in verl, `_actors` in RLlib's manager."""
_BY_ITS_ENGINE = "the profiler of the engine in it records this process"
_EXCHANGES = 3
"""Small exchanges after a start or stop, for the clocks: of a few, one is short."""
_CLOCK_S = 0.1
"""For all of them: a worker that is busy again has said enough."""


def fleet_of(
    workers: object, engine_workers: Mapping[int, Sequence[object]] | None = None
) -> RayFleet | None:
    """Return the fleet of `workers` and `engine_workers`; None when they are not Ray's.

    Args:
        workers: An actor handle, a sequence of them in rank order, a {number: handle}, an object that keeps
            one of these in `workers`, or {role: any of these}; None for nothing. An actor that is given twice
            takes part once, in its first place.
        engine_workers: By replica, the actors that the engine's own profiler records: they record spans only,
            under the role they have in `workers`, or else `rollout`.

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
            raise not_workers(groups[role], role)
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
        """Pay the profiler's one-off costs on all workers at once; one outcome each."""
        return await asyncio.gather(*(worker.prepare(request, deadline_s) for worker in self.workers))

    async def start(self, request: StartRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Open the capture on all workers at once; one outcome each. Cancelled, it is taken back."""
        try:
            return await asyncio.gather(*(worker.start(request, deadline_s) for worker in self.workers))
        except BaseException:
            for worker in self.workers:
                worker.take_back(request.capture_id, "opening the capture was given up")
                worker.in_doubt = True
            raise

    async def stop(self, request: StopRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Close it on the workers that began, or may have; one outcome each. `start` told of the others."""
        asked = [worker for worker in self.workers if worker.begun is not None or worker.in_doubt]
        return await asyncio.gather(*(worker.stop(request, deadline_s) for worker in asked))

    async def drain(self, timeout_s: float) -> list[WorkerOutcome]:
        """Wait until the workers that began have written their files; one outcome each."""
        begun = [worker for worker in self.workers if worker.begun is not None]
        return await asyncio.gather(*(worker.drain(timeout_s) for worker in begun))

    async def gather(
        self, request: GatherRequest, home: Home, left_s: Callable[[], float]
    ) -> list[WorkerOutcome]:
        """Fetch the files of the workers that are apart; one outcome each. An engine's files come with the
        first of them on its host.
        """
        apart = [worker for worker in self.workers if worker.begun is not None and worker.begun.apart]
        files = dict(request.engine_files)
        asked = [(worker, files.pop(worker.host, [])) for worker in apart]
        return await asyncio.gather(
            *(worker.gather(request.capture_id, named, home, left_s) for worker, named in asked)
        )

    def release(self, capture_id: str) -> None:
        """Let the workers that are apart forget their files, which are here. Waits for nobody."""
        for worker in self.workers:
            if worker.begun is not None and worker.begun.apart:
                worker.release(capture_id)


class Begun(NamedTuple):
    """Answer of a worker to its start."""

    process: ProcessInfo
    where: Where
    apart: bool


class Worker:
    """One actor of a capture. What goes wrong with it is an outcome; only a cancellation is raised."""

    def __init__(self, actor: ActorHandle[Any], role: str | None, position: int, world_size: int) -> None:
        self.actor_id: str = actor._actor_id.hex()
        self.name = f"{role or 'worker'}[{position}] {_brief(actor)}"
        self.begun: Begun | None = None
        self.in_doubt = False
        """Its start was cancelled on the way: whether it began, only a stop will tell."""
        self.spans_only: str | None = None
        self.replica: int | None = None
        """Number of the inference replica that it belongs to."""
        self._role = role
        self._position = position
        self._world_size = world_size
        self._line = ActorLine(actor)

    async def prepare(self, request: PrepareRequest, deadline_s: float) -> WorkerOutcome:
        if self.spans_only is not None:  # its engine's own check does it
            return dataclasses.replace(self._outcome("ok"), roles=(self._role or "rollout",))
        request = msgspec.structs.replace(
            request, role=self._role or request.role, position=self._position, world_size=self._world_size
        )
        return await self._within(deadline_s, "prepare", self._prepare(request))

    async def start(self, request: StartRequest, deadline_s: float) -> WorkerOutcome:
        request = msgspec.structs.replace(
            request,
            role=self._role or request.role,
            position=self._position,
            world_size=self._world_size,
            replica=self.replica,
            spans_only=self.spans_only,
        )
        until_s = time.monotonic() + deadline_s
        outcome = await self._within(deadline_s, "start", self._start(request, until_s))
        if outcome.state != "ok":
            self.take_back(request.capture_id, outcome.reason or outcome.state)
        return await self._with_clock(outcome)

    def take_back(self, capture_id: str, reason: str) -> None:
        """End what the worker began, or is yet to begin."""
        self.begun = None
        self._line.tell(stop_here, StopRequest(capture_id=capture_id, discard=reason))

    async def stop(self, request: StopRequest, deadline_s: float) -> WorkerOutcome:
        outcome = await self._within(deadline_s, "stop", self._stop(request))
        return await self._with_clock(outcome)

    async def drain(self, timeout_s: float) -> WorkerOutcome:
        # The worker itself keeps to the time; the second is for its answer.
        return await self._within(timeout_s + 1, "the wait for its files", self._drain(timeout_s))

    async def gather(
        self, capture_id: str, engine_files: list[str], home: Home, left_s: Callable[[], float]
    ) -> WorkerOutcome:
        try:
            left = await self._fetch(capture_id, engine_files, home, left_s)
        except asyncio.TimeoutError:
            return self._outcome("failed", f"not fetched in time; they lie on {self.host}")
        except (EngineError, OSError, RuntimeError) as error:  # the last: no threads at an interpreter's end
            return self._outcome("failed", f"{error}; what was not fetched lies on {self.host}")
        return self._outcome("ok") if left is None else self._outcome("failed", left)

    def release(self, capture_id: str) -> None:
        self._line.tell(release_here, capture_id)

    @property
    def host(self) -> str:
        return "" if self.begun is None else self.begun.process.host

    async def _fetch(
        self, capture_id: str, engine_files: list[str], home: Home, left_s: Callable[[], float]
    ) -> str | None:
        """Return the reason why a file was left on its host; None if all are here."""
        unwritten = ["everything"]
        while unwritten and left_s() > 0:  # in short waits: there may be less time than there was
            unwritten = await asyncio.wait_for(self._line.call(drain_here, min(1.0, left_s())), left_s() + 1)
        files = await asyncio.wait_for(self._line.call(files_here, capture_id, engine_files), left_s())
        refused: str | None = None
        for file in files:
            if not await own_thread(home.lacks, file):
                continue
            reason = await own_thread(home.refuses, file)
            if reason is None:
                await self._fetch_file(capture_id, file, await own_thread(home.begin, file), left_s)
            refused = refused or reason
        if refused is not None:
            return f"traces were left on {self.host}: {refused}"
        if not any(home.is_part(file) for file in files):
            disk = f"{self.host}'s disk: full, removed, or not to be written"
            return f"its part of the manifest is not on {disk}; the rest is here"
        return f"on {self.host}, not written in time: {', '.join(unwritten)}" if unwritten else None

    async def _fetch_file(
        self, capture_id: str, file: Remote, arrival: Arrival, left_s: Callable[[], float]
    ) -> None:
        try:
            while arrival.bytes < file.size_bytes:
                call = self._line.call(piece_here, capture_id, file.path, arrival.bytes)
                piece = await asyncio.wait_for(call, left_s())
                if not piece:
                    raise EngineError(f"{file.path} became shorter while it was fetched")
                await own_thread(arrival.add, piece)
            await own_thread(arrival.finish)
        except BaseException:
            await own_thread(arrival.give_up)
            raise

    async def _start(self, request: StartRequest, until_s: float) -> WorkerOutcome:
        await self._line.ask(present)
        left_ns = int((until_s - time.monotonic()) * 1e9)
        expires_ns = self._line.stamps[-1].answered_ns + left_ns
        answer, where = await self._line.call(start_here, request, expires_ns)
        if answer.refused is not None:
            return self._outcome("skipped" if answer.off else "failed", answer.refused)
        self.begun = Begun(answer.process, where, answer.apart)
        return dataclasses.replace(self._outcome("ok"), apart=answer.apart)

    async def _prepare(self, request: PrepareRequest) -> WorkerOutcome:
        answer = await self._line.call(prepare_here, request)
        outcome = self._outcome("ok" if answer.problem is None else "failed", answer.problem)
        return dataclasses.replace(outcome, roles=answer.roles, warnings=answer.warnings)

    async def _stop(self, request: StopRequest) -> WorkerOutcome:
        # Given up here, it goes on there: a late stop still closes.
        answer, where = await self._line.call(stop_here, request, keep=True)
        if answer.process is None and self.begun is not None and self.begun.where.pid != where.pid:
            return self._outcome("missing", "the actor restarted: what it had recorded is lost")
        return self._outcome("ok")

    async def _drain(self, timeout_s: float) -> WorkerOutcome:
        unfinished = await self._line.call(drain_here, timeout_s)
        if unfinished:
            return self._outcome("failed", f"not written within {timeout_s:g} s: {', '.join(unfinished)}")
        return self._outcome("ok")

    async def _within(
        self, deadline_s: float, what: str, work: Coroutine[Any, Any, WorkerOutcome]
    ) -> WorkerOutcome:
        try:
            return await asyncio.wait_for(work, deadline_s)
        except asyncio.TimeoutError:
            reason = f"timeout: {what} had no answer within {deadline_s:g} s (is it busy, or still starting?)"
            return self._outcome("failed", reason)
        except ActorGoneError as error:
            return self._outcome("missing", str(error))
        except EngineError as error:
            return self._outcome("failed", f"{what}: {error}")

    async def _with_clock(self, outcome: WorkerOutcome) -> WorkerOutcome:
        """After the deadline's business: a worker that answered in time is not failed for its clock."""
        if self.begun is None or outcome.state != "ok":
            return outcome
        now_ns, now_mono_ns = time.time_ns(), time.monotonic_ns()
        estimate: Estimate | None = Estimate(0, 0, now_ns)
        if self.begun.where.machine is None or self.begun.where.machine != boot_id():
            with suppress(asyncio.TimeoutError, EngineError):
                await asyncio.wait_for(self._exchange(), _CLOCK_S)
            estimate = estimate_offset(Exchange(*stamps) for stamps in self._line.stamps)
        self._line.stamps.clear()  # the next comparison is of its own time
        if estimate is None:
            return outcome
        clock = ClockOffset(
            process=self.begun.process.key,
            offset_ns=estimate.offset_ns,
            uncertainty_ns=estimate.within_ns,
            at_mono_ns=now_mono_ns + estimate.at_ns - now_ns,
        )
        return dataclasses.replace(outcome, clock=clock)

    async def _exchange(self) -> None:
        for _ in range(_EXCHANGES):
            await self._line.ask(present)

    def _outcome(self, state: State, reason: str | None = None) -> WorkerOutcome:
        process = None if self.begun is None else self.begun.process.key
        return WorkerOutcome(name=self.name, state=state, reason=reason, process=process)


# In the actor's process.


class Where(NamedTuple):
    """The process that answers."""

    pid: int
    machine: str | None


_turn = threading.Lock()
"""Starts and stops one at a time: threaded and async actors run them side by side, and in any order."""


def start_here(instance: object, request: StartRequest, expires_ns: int) -> tuple[StartAnswer, Where]:
    """Args: expires_ns: On this machine's wall clock; nobody waits for a start that comes later."""
    with _turn:
        if time.time_ns() > expires_ns:
            raise EngineError("it came too late: the worker was busy past the deadline")
        answer = start_worker(request, instance)
        renew_methods(instance)
        return answer, _where()


def prepare_here(instance: object, request: PrepareRequest) -> PrepareAnswer:
    answer = prepare_worker(request, instance)
    renew_methods(instance)
    return answer


def renew_methods(instance: object) -> None:
    """Let calls from other processes reach methods that were instrumented after the actor was made.

    Ray (2.60: `FunctionActorManager.load_actor_class`) keeps the functions that the class had then, each in
    the closure of what it executes, and never looks at the class again.
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
    except Exception as error:
        failures.note("instrumenting the methods that Ray calls (`stepscope run` does so earlier)", error)


def stop_here(instance: object, request: StopRequest) -> tuple[StopAnswer, Where]:
    with _turn:
        return stop_worker(request), _where()


async def drain_here(instance: object, timeout_s: float) -> list[str]:
    return await own_thread(drain_worker, timeout_s)


def files_here(instance: object, capture_id: str, engine_files: list[str]) -> list[Remote]:
    return fetch.files_of(capture_id, engine_files)


def piece_here(instance: object, capture_id: str, path: str, offset: int) -> bytes:
    return fetch.piece_of(capture_id, path, offset)


def release_here(instance: object, capture_id: str) -> None:
    fetch.release(capture_id)


def _where() -> Where:
    return Where(os.getpid(), boot_id())


# In the process that opens the capture.


def _handles(group: object) -> list[ActorHandle[Any]] | None:
    """Return the actor handles in `group`, in order; None when it is something else."""
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
            "leave it out; the process that opens a capture is recorded anyway",
        )


def _brief(actor: ActorHandle[Any]) -> str:
    """`Actor(ClassName, 0123abcd)`."""
    kind, _, number = repr(actor).rstrip(")").partition(", ")
    return f"{kind}, {number[:8]})"
