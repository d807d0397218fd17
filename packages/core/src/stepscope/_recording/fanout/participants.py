"""The other processes of a capture: its workers and its engines, started and stopped concurrently.

The types of the arguments `workers` and `engines` of `capture` and `prepare` are here too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from stepscope._recording.fanout.engines import EngineGroup
from stepscope._recording.fanout.fetch import Home
from stepscope._recording.fanout.messages import StartRequest, StopRequest, WorkerOutcome
from stepscope._recording.fanout.ray_fleet import load_fleet
from stepscope._recording.process import failures, identity
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.session import pipeline
from stepscope._recording.session.session import Session
from stepscope.config._fields import closest
from stepscope.engines import installed, load_engine, recognise
from stepscope.engines.protocol import INSTALL_AN_ADAPTER, EngineProfiler
from stepscope.errors import ConfigError, EngineError, ours
from stepscope.files.layout import sidecar_of
from stepscope.files.manifest import Absent, Expectation, State, awaited
from stepscope.files.manifest_parts import with_late_files


class WorkerHandle(Protocol):
    """A handle of a worker in another process, as Ray's `Class.remote(...)` returns it."""

    @property
    def _actor_id(self) -> object: ...


class HasWorkers(Protocol):
    """A worker group with handles, such as verl's `RayWorkerGroup`."""

    @property
    def workers(self) -> Sequence[WorkerHandle] | Mapping[int, WorkerHandle]: ...


class HasActors(Protocol):
    """A manager with handles, such as RLlib's `FaultTolerantActorManager`."""

    @property
    def _actors(self) -> Sequence[WorkerHandle] | Mapping[int, WorkerHandle]: ...


WorkerGroup: TypeAlias = (
    WorkerHandle | Sequence[WorkerHandle] | Mapping[int, WorkerHandle] | HasWorkers | HasActors
)
"""Workers of one role: a handle, handles in rank order, {number: handle}, or an object that has handles."""
Workers: TypeAlias = WorkerGroup | Mapping[str, object]
"""Workers of one role, or {role: workers}. mypy reads `{"a": [x], "b": x}` as a mapping to objects."""
Engines: TypeAlias = EngineProfiler | str | Sequence[object] | object
"""An engine of an installed adapter, a profiler of an engine, or the name of an adapter; or a sequence of
engines, profilers and names in replica order."""


def profilers_of(engines: object) -> list[EngineProfiler]:
    """Return one profiler for each replica, numbered in the given order.

    Processes that a launcher (torchrun) started have different engines, so their numbers continue from
    process to process, unless several processes form one replica.

    Args:
        engines: The argument of `capture`. The name of an adapter means its engines in this process.

    Raises:
        ConfigError: two engines have the same replica number, this process has no engine of a named adapter,
            or an engine is a Ray actor.
        EngineError: no installed adapter recognises an engine.
    """
    items = list(engines) if isinstance(engines, Sequence) and not isinstance(engines, str) else [engines]
    given = [engine for item in items for engine in (_owned(item) if isinstance(item, str) else [item])]
    profilers = [_numbered(engine, position, len(given)) for position, engine in enumerate(given)]
    numbers = [profiler.replica for profiler in profilers]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(
            "capture(engines=)", numbers, "a replica number of its own for each engine",
            "construct each profiler with replica=0, 1, 2...",
        )  # fmt: skip
    return profilers


def _numbered(engine: object, position: int, count: int) -> EngineProfiler:
    has_number = isinstance(engine, EngineProfiler) and engine.replica is not None
    profiler = _recognised(engine, position)
    if not has_number:
        rank, _ = identity.place()
        profiler.replica = rank // profiler.processes * count + position
    return profiler


def _recognised(engine: object, replica: int) -> EngineProfiler:
    try:
        return recognise(engine, replica)
    except EngineError:
        ray = sys.modules.get("ray.actor")
        if ray is None or not isinstance(engine, ray.ActorHandle):
            raise
    raise ConfigError(
        "capture(engines=)",
        repr(engine),
        "an engine or its profiler; a Ray actor only says where one is",
        "give it as workers={'rollout': [actor]}, which records spans and torch there; for the engine's own "
        "profiler wrap it: stepscope.engines.ray.RayRollout(actor, NAME), NAME being that of its adapter: "
        f"{', '.join(sorted(installed()))}",
    )


def _owned(name: str) -> Sequence[object]:
    """Return the engines of the adapter `name` in this process."""
    objects = "the engine objects, RayRollout(actor) for those in Ray actors"
    if "://" in name:
        raise ConfigError(
            "capture(engines=)", name, f"an adapter's name, or {objects}",
            "say which engine serves there: its adapter has a profiler for servers, such as VllmServer(url)",
        )  # fmt: skip
    names = sorted(installed())
    if name not in names:
        allowed = f"the name of an installed adapter ({', '.join(names) or 'none'}), or {objects}"
        near = closest(name, names)
        fix = (
            f"did you mean {near!r}?" if near else f"install the adapter of that engine: {INSTALL_AN_ADAPTER}"
        )
        raise ConfigError("capture(engines=)", name, allowed, fix)
    engines = load_engine(name).owned()
    if not engines:
        raise ConfigError(
            "capture(engines=)", name, f"the name of an engine in this process, which has none, or {objects}",
            "pass the engines themselves; for those in other processes RayRollout(actor) or a server",
        )  # fmt: skip
    return engines


T = TypeVar("T")


class Participants:
    """Workers and engines of one capture. Errors of workers and engines are recorded in the manifest and not
    raised.
    """

    _session: Session
    """The owner's session. `join` sets `_session` and `_group`."""
    _group: EngineGroup

    def __init__(self, workers: object, engines: object, *, checked: bool = False) -> None:
        """
        Args:
            checked: True if the arguments were checked at the run's first capture. An error is then recorded
                and not raised.

        Raises:
            ConfigError, EngineError: a worker or an engine is of an unknown kind.
        """
        self._checked = checked
        self._wrong: dict[str, str] = {}
        """{argument that is left out: reason}."""
        self.profilers = self._taken("engines", partial(profilers_of, engines), engines is not None) or []
        recorded = {
            profiler.replica or 0: profiler.workers for profiler in self.profilers if profiler.workers
        }
        is_fleet = workers is not None or bool(recorded)
        self.fleet = self._taken("workers", partial(load_fleet, workers, recorded), is_fleet)
        self.apart: list[str] = []
        """Names of workers whose files must be fetched, because they write to a folder that this process
        cannot read."""
        self._released = False

    def _taken(self, argument: str, take: Callable[[], T], is_given: bool) -> T | None:
        """Return the result of `take` for an argument, or None if the argument is not given or is left
        out.
        """
        try:
            return take() if is_given else None
        except ours(ConfigError, EngineError) as error:
            if not self._checked:
                raise
            self._wrong[argument] = str(error)
            return None

    def join(self, session: Session) -> None:
        """Connect the participants to the owner's session, and record arguments that are left out as
        failed.
        """
        for argument, reason in self._wrong.items():
            session.manifest_part.fail(
                argument, reason, kind="engine" if argument == "engines" else "selection"
            )
        for profiler in self.profilers:
            session.sample_engine(profiler)
        self._session, self._group = session, EngineGroup(self.profilers, session)

    async def start(self) -> None:
        """Start all participants, and return once each has begun, has failed, or has reached its deadline."""
        deadline_s = self._session.config.budget.fanout_seconds
        await asyncio.gather(self._start_workers(deadline_s), self._group.start(deadline_s))

    async def stop(self, request: StopRequest, deadline_s: float) -> None:
        """Stop all participants that have begun or may have begun."""
        await asyncio.gather(self._stop_workers(request, deadline_s), self._group.stop(deadline_s))

    async def gather(self, left_s: Callable[[], float]) -> None:
        """Fetch the files of the workers in `apart`, and engines' files that only the workers' hosts have."""
        session, manifest_part = self._session, self._session.manifest_part
        self._group.outcomes.look_again()  # late files may be here now: a shared disk may be slow
        if self.fleet is None:
            return
        home = Home(session.layout, session.config)
        artifacts = [artifact for item in manifest_part.record.expected for artifact in item.artifacts]
        remote = [artifact for artifact in artifacts if not home.path_of(artifact.path).exists()]
        files: dict[str, list[str]] = {}
        for artifact in remote:
            files.setdefault(artifact.host, []).append(artifact.path)
        fetched = [name for name in self.apart if manifest_part.state(files_of(name)) == "ok"]
        if len(fetched) < len(self.apart) or remote:
            for outcome in await self.fleet.gather(session.capture_id, files, home, left_s):
                if outcome.name not in fetched:  # a fetched worker only sent an engine's files
                    _enter_fetched(manifest_part, outcome)
            self._group.outcomes.look_again()
            manifest_part.write()
            for path in (home.path_of(artifact.path) for artifact in remote):
                if path.exists() and sidecar_of(path).exists():
                    pipeline.artifact_done(path, None, manifest_part)
        self._release(home)

    def _release(self, home: Home) -> None:
        """Tell the workers to forget the capture, once all files are here and no late files of engines are
        expected.
        """
        manifest_part = self._session.manifest_part
        (part,) = with_late_files(self._session.layout, [manifest_part.record])
        items = part.expected
        is_over = (
            all(manifest_part.state(files_of(name)) == "ok" for name in self.apart)
            and all(home.path_of(artifact.path).exists() for item in items for artifact in item.artifacts)
            and not any(item.pending == "late" for item in items)
        )
        if self.fleet is not None and is_over and not self._released:
            self._released = True
            self.fleet.release(self._session.capture_id)

    def taking_part(self) -> dict[str, str]:
        """Return {worker or replica: `began`, or the reason why it did not begin}."""
        part = self._session.manifest_part.record
        answers = dict.fromkeys((*part.began.values(), *self.apart), "began")
        answers |= {absent.name: absent.reason for absent in part.absent}
        for item in part.expected:
            if item.kind == "engine":
                answers[item.name] = "began" if item.pending == "closing" else item.reason or item.state
        return answers

    async def _start_workers(self, deadline_s: float) -> None:
        if self.fleet is None:
            return
        session = self._session
        request = StartRequest(
            capture_id=session.capture_id,
            run_id=session.run_id,
            step=session.step,
            config=session.config,
            owner_part=session.part_name,
        )
        outcomes = await self.fleet.start(request, deadline_s)
        manifest_part, fetched = session.manifest_part, session.config.finish.gather
        self.apart = [outcome.name for outcome in outcomes if outcome.apart and fetched]
        for name in self.apart:
            manifest_part.expect(awaited(files_of(name), "fetch", "fetching"))
        began = {outcome.process: outcome.name for outcome in outcomes if outcome.process is not None}
        manifest_part.update(began={key: name for key, name in began.items() if name not in self.apart})
        _enter(manifest_part, outcomes)

    async def _stop_workers(self, request: StopRequest, deadline_s: float) -> None:
        if self.fleet is not None:
            _enter(self._session.manifest_part, await self.fleet.stop(request, deadline_s))


def files_of(name: str) -> str:
    """Return the manifest's name for the files of a worker in `apart`."""
    return f"files of {name}"


def _enter_fetched(manifest_part: ManifestPart, outcome: WorkerOutcome) -> None:
    name = files_of(outcome.name)
    state: State = "ok" if outcome.state == "ok" else "failed"
    manifest_part.expect(Expectation(name=name, kind="fetch", state=state, reason=outcome.reason))
    if state != "ok":
        failures.warn("stepscope: step %d: %s: %s", manifest_part.record.step, name, outcome.reason)


def _enter(manifest_part: ManifestPart, outcomes: list[WorkerOutcome]) -> None:
    manifest_part.add_absent(
        tuple(
            Absent(
                name=outcome.name,
                state=outcome.state,
                reason=outcome.reason or "",
                process=outcome.process,
                died=outcome.died,
            )
            for outcome in outcomes
            if outcome.state != "ok"
        )
    )
    manifest_part.add_clocks(tuple(outcome.clock for outcome in outcomes if outcome.clock is not None))
