"""Captures in Ray actors, whose classes need no change.

All workers are called concurrently, each with its own deadline. A start also carries the deadline as a time
on the worker's clock, so that a busy worker does not start late. A call before the start reads this clock,
unless the worker is known to be on this machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Sized
from contextlib import suppress
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from stepscope._recording.fanout import fetch, in_actor
from stepscope._recording.fanout.fetch import Home, Remote
from stepscope._recording.fanout.in_actor import Sent
from stepscope._recording.fanout.messages import (
    PrepareRequest,
    StartRequest,
    StopRequest,
    WorkerOutcome,
    WorkerRequest,
)
from stepscope.engines.actor_call import ActorGoneError, ActorLine, present
from stepscope.engines.own_thread import own_thread
from stepscope.errors import ConfigError, EngineError
from stepscope.files.clock import ClockOffset, Estimate, Exchange, estimate_offset
from stepscope.files.manifest import State
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import Arrival, boot_id

if TYPE_CHECKING:
    from ray.actor import ActorHandle


R = TypeVar("R", bound=WorkerRequest)

_EXCHANGES = 3
"""Number of short calls after a start or stop to compare clocks. The fastest call counts."""
_CLOCK_S = 0.1
"""Deadline of all `_EXCHANGES` calls together, so that a busy worker does not delay the capture."""


_here: set[str] = set()
"""Ids of actors that were on this machine at their last answer, and so share its wall clock. One writer:
`Worker`."""


class Begun(NamedTuple):
    """Answer of a worker to its start."""

    process: ProcessInfo
    here: bool
    """True if the worker runs on this machine."""
    apart: bool


class Worker:
    """One actor of a capture. Errors become outcomes; only a cancellation is raised."""

    def __init__(self, actor: ActorHandle[Any], role: str | None, position: int, world_size: int) -> None:
        self.actor_id: str = actor._actor_id.hex()
        self.name = f"{role or 'worker'}[{position}] {_brief(actor)}"
        self.begun: Begun | None = None
        self.in_doubt = False
        """True if the start was cancelled before the worker answered, so that the worker may have begun."""
        self.spans_only: str | None = None
        self.replica: int | None = None
        """Number of the worker's inference replica, or None."""
        self._role = role
        self._position = position
        self._world_size = world_size
        self._line = ActorLine(actor)

    async def prepare(self, request: PrepareRequest, deadline_s: float) -> WorkerOutcome:
        if self.spans_only is not None and not request.record_only:  # the check of its engine suffices
            return dataclasses.replace(self._outcome("ok"), roles=(self._role or "rollout",))
        outcome = await self._within(deadline_s, "prepare", self._prepare(self._addressed(request)))
        if not request.record_only or outcome.process is None:
            return outcome
        # The flight recorder converts times of other hosts with this clock offset.
        return await self._compared(outcome, outcome.process, f"_{gethostname()}_pid" in outcome.process)

    async def start(self, request: StartRequest, deadline_s: float) -> WorkerOutcome:
        request = msgspec.structs.replace(self._addressed(request), spans_only=self.spans_only)
        until_s = time.monotonic() + deadline_s
        outcome = await self._within(deadline_s, "start", self._start(request, until_s))
        if outcome.state != "ok":
            self.take_back(request.capture_id, outcome.reason or outcome.state)
        return await self._with_clock(outcome)

    def _addressed(self, request: R) -> R:
        """Return a copy of the request with the fields that identify this worker."""
        return msgspec.structs.replace(
            request,
            role=self._role or request.role,
            position=self._position,
            world_size=self._world_size,
            replica=self.replica,
        )

    def take_back(self, capture_id: str, reason: str) -> None:
        """Discard the capture that the worker has begun or may still begin, without waiting for the
        worker.
        """
        self.begun = None
        self._line.tell(in_actor.stop_here, StopRequest(capture_id=capture_id, discard=reason))

    async def stop(self, request: StopRequest, deadline_s: float) -> WorkerOutcome:
        outcome = await self._within(deadline_s, "stop", self._stop(request))
        return await self._with_clock(outcome)

    async def drain(self, timeout_s: float) -> WorkerOutcome:
        # The worker itself observes `timeout_s`; the extra second is for its answer.
        return await self._within(timeout_s + 1, "writing its files", self._drain(timeout_s))

    async def gather(
        self, capture_id: str, engine_files: list[str], home: Home, left_s: Callable[[], float]
    ) -> WorkerOutcome:
        try:
            left = await self._fetch(capture_id, engine_files, home, left_s)
        except asyncio.TimeoutError:
            return self._outcome("failed", f"not fetched in time; its files are on {self.host}")
        # RuntimeError: no thread can be started at exit.
        except (EngineError, OSError, RuntimeError) as error:
            return self._outcome("failed", f"{error}; the files that were not fetched are on {self.host}")
        return self._outcome("ok") if left is None else self._outcome("failed", left)

    def release(self, capture_id: str) -> None:
        self._line.tell(in_actor.call_here, fetch.release, capture_id)

    @property
    def host(self) -> str:
        return "" if self.begun is None else self.begun.process.host

    async def _fetch(
        self, capture_id: str, engine_files: list[str], home: Home, left_s: Callable[[], float]
    ) -> str | None:
        """Fetch the files. Return None if all files are here, else the reason why a file is missing."""
        unwritten = ["everything"]
        while unwritten and left_s() > 0:  # in short waits, because `left_s` may shrink
            unwritten = await asyncio.wait_for(
                self._line.call(in_actor.drain_here, min(1.0, left_s())), left_s() + 1
            )
        files = await asyncio.wait_for(
            self._line.call(in_actor.call_here, fetch.files_of, capture_id, engine_files), left_s()
        )
        refused: str | None = None
        for file in files:
            arrival = await own_thread(home.begin, file)
            if isinstance(arrival, Arrival):
                await self._fetch_file(capture_id, file, arrival, left_s)
            else:
                refused = refused or arrival
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
                call = self._line.call(
                    in_actor.call_here, fetch.piece_of, capture_id, file.path, arrival.bytes
                )
                piece = await asyncio.wait_for(call, left_s())
                if not piece:
                    raise EngineError(f"{file.path} became shorter while it was fetched")
                await own_thread(arrival.add, piece)
            await own_thread(arrival.finish)
        except BaseException:
            await own_thread(arrival.give_up)
            raise

    async def _start(self, request: StartRequest, until_s: float) -> WorkerOutcome:
        now_ns = time.time_ns()
        if self.actor_id in _here:
            _here.remove(self.actor_id)  # the actor may have moved to another host since
        else:
            await self._line.ask(present)
            now_ns = self._line.stamps[-1].answered_ns
        expires_ns = now_ns + int((until_s - time.monotonic()) * 1e9)
        answer, machine = await self._line.call(in_actor.start_here, Sent(request), expires_ns)
        here = machine is not None and machine == boot_id()
        if here:
            _here.add(self.actor_id)
        if answer.refused is not None:
            return self._outcome("skipped" if answer.off else "failed", answer.refused)
        self.begun = Begun(answer.process, here, answer.apart)
        return dataclasses.replace(self._outcome("ok"), apart=answer.apart)

    async def _prepare(self, request: PrepareRequest) -> WorkerOutcome:
        # After a timeout, the call continues in the worker, which is then prepared for a later step.
        answer = await self._line.call(in_actor.prepare_here, Sent(request), keep=True)
        outcome = self._outcome("ok" if answer.problem is None else "failed", answer.problem)
        process = None if answer.recorder is None else answer.recorder.key
        return dataclasses.replace(outcome, roles=answer.roles, warnings=answer.warnings, process=process)

    async def _stop(self, request: StopRequest) -> WorkerOutcome:
        # After a timeout, the call continues in the worker, which then still closes its capture.
        was_open, pid = await self._line.call(in_actor.stop_here, request, keep=True)
        if not was_open and self.begun is not None and self.begun.process.pid != pid:
            return self._outcome("missing", "the actor restarted: what it had recorded is lost")
        return self._outcome("ok")

    async def _drain(self, timeout_s: float) -> WorkerOutcome:
        unfinished = await self._line.call(in_actor.drain_here, timeout_s)
        if unfinished:
            return self._outcome("failed", f"not written within {timeout_s:g} s: {', '.join(unfinished)}")
        return self._outcome("ok")

    async def _within(
        self, deadline_s: float, what: str, work: Coroutine[Any, Any, WorkerOutcome]
    ) -> WorkerOutcome:
        try:
            return await asyncio.wait_for(work, deadline_s)
        except asyncio.TimeoutError:
            reason = (
                f"timeout: {what} had no answer within {deadline_s:g} s; the worker may be busy or starting"
            )
            return dataclasses.replace(self._outcome("failed", reason), late=True)
        except ActorGoneError as error:
            return dataclasses.replace(self._outcome("missing", str(error)), died=error.died)
        except EngineError as error:
            return self._outcome("failed", f"{what}: {error}")

    async def _with_clock(self, outcome: WorkerOutcome) -> WorkerOutcome:
        """Add the worker's clock offset to its outcome. An error in the measurement does not change the
        state.
        """
        if self.begun is None or outcome.state != "ok":
            return outcome
        return await self._compared(outcome, self.begun.process.key, self.begun.here)

    async def _compared(self, outcome: WorkerOutcome, process: str, here: bool) -> WorkerOutcome:
        """Add the clock offset of a process to the worker's outcome.

        Args:
            here: True if the process is on this machine.
        """
        now_ns, now_mono_ns = time.time_ns(), time.monotonic_ns()
        estimate: Estimate | None = Estimate(0, 0, now_ns)
        if not here:
            with suppress(asyncio.TimeoutError, EngineError):
                await asyncio.wait_for(self._exchange(), _CLOCK_S)
            estimate = estimate_offset(Exchange(*stamps) for stamps in self._line.stamps)
        self._line.stamps.clear()  # the next comparison needs new exchanges
        if estimate is None:
            return outcome
        clock = ClockOffset(
            process=process,
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


def _brief(actor: ActorHandle[Any]) -> str:
    """Return `Actor(ClassName, 0123abcd)`."""
    kind, _, number = repr(actor).rstrip(")").partition(", ")
    return f"{kind}, {number[:8]})"


_LISTS = ("workers", "_workers", "actors", "_actors")
"""Attributes of worker groups that have handles: `workers` in verl, `_actors` in RLlib."""
_BY_ITS_ENGINE = "the profiler of the engine in it records this process"


def load_fleet(workers: object, engine_workers: Mapping[int, Sequence[object]] | None = None) -> RayFleet:
    """Return the fleet of `workers` and `engine_workers`.

    Args:
        workers: The argument of `capture(workers=)`, or None.
        engine_workers: {replica: workers that the engine's own profiler records}. They record only spans.

    Raises:
        ConfigError: `workers` contains something other than workers.
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
    """Return the fleet of `workers` and `engine_workers`, or None if they are not Ray actors.

    Args:
        workers: A handle, a sequence of handles in rank order, {number: handle}, an object whose attribute
            (`_LISTS`) has the handles, or {role: handles in one of these forms}. None for no workers. An
            actor that is given twice takes part once, at its first position.
        engine_workers: {replica: actors that the engine's own profiler records}. They record only spans, with
            their role in `workers`, else `rollout`.

    Raises:
        ConfigError: only some items of a sequence are actor handles, or an actor is the calling actor itself.
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
        """Prepare all workers concurrently. The outcome of a worker whose profiler cannot work is
        `failed`.
        """
        return await asyncio.gather(*(worker.prepare(request, deadline_s) for worker in self.workers))

    async def start(self, request: StartRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Open the capture on all workers concurrently, and return their outcomes. An error of a worker is
        not raised.

        After a cancellation, each worker is asked to discard the capture. Then the cancellation is raised.
        """
        try:
            return await asyncio.gather(*(worker.start(request, deadline_s) for worker in self.workers))
        except BaseException:
            for worker in self.workers:
                worker.take_back(request.capture_id, "opening the capture was given up")
                worker.in_doubt = True
            raise

    async def stop(self, request: StopRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Close the capture concurrently on all workers that have begun or may have begun. Return their
        outcomes.
        """
        asked = [worker for worker in self.workers if worker.begun is not None or worker.in_doubt]
        return await asyncio.gather(*(worker.stop(request, deadline_s) for worker in asked))

    async def drain(self, timeout_s: float) -> list[WorkerOutcome]:
        """Wait until the workers have written their files. At the deadline the outcome is `failed`, with the
        unwritten files as the reason.
        """
        begun = [worker for worker in self.workers if worker.begun is not None]
        return await asyncio.gather(*(worker.drain(timeout_s) for worker in begun))

    async def gather(
        self, capture_id: str, engine_files: dict[str, list[str]], home: Home, left_s: Callable[[], float]
    ) -> list[WorkerOutcome]:
        """Fetch the files of workers that are apart, until `left_s` returns 0. Return their outcomes.

        Args:
            engine_files: {host: paths of files that engines wrote there, relative to the step's folder}.
        """
        apart = [worker for worker in self.workers if worker.begun is not None and worker.begun.apart]
        files = dict(engine_files)  # the first worker on an engine's host also sends the engine's files
        asked = [(worker, files.pop(worker.host, [])) for worker in apart]
        return await asyncio.gather(
            *(worker.gather(capture_id, named, home, left_s) for worker, named in asked)
        )

    def release(self, capture_id: str) -> None:
        """Tell the workers, without waiting, to forget the capture, because all its files are here."""
        for worker in self.workers:
            if worker.begun is not None and worker.begun.apart:
                worker.release(capture_id)


def _handles(group: object) -> list[ActorHandle[Any]] | None:
    """Return the actor handles in `group` in order, or None if `group` is something else."""
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
    """Return the error for a value in `capture(workers=group)`, or `{role: group}`, that is not a worker."""
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
