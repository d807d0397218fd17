"""The other processes of a capture: its workers and its engines, started and stopped concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from stepscope._recording.after import pipeline
from stepscope._recording.fanout.engines import EngineGroup
from stepscope._recording.fanout.fetch import Home
from stepscope._recording.fanout.given_engines import profilers_of
from stepscope._recording.fanout.messages import StartRequest, StopRequest, WorkerOutcome
from stepscope._recording.fanout.ray_fleet import load_fleet
from stepscope._recording.output.manifest_part import ManifestPart
from stepscope._recording.process import failures
from stepscope._recording.session.session import Session
from stepscope.errors import ConfigError, EngineError, ours
from stepscope.files.layout import sidecar_of
from stepscope.files.manifest.late import with_late_files
from stepscope.files.manifest.records import Absent, Expectation, State, awaited

T = TypeVar("T")


class Participants:
    """Workers and engines of one capture. Their outcomes are recorded in the manifest, and no failure is
    raised.
    """

    _session: Session
    """The owner's session. `join` sets this field and `_group`."""
    _group: EngineGroup

    def __init__(self, workers: object, engines: object, *, checked: bool = False) -> None:
        """Args:
            checked: True if the run's first capture has checked these arguments. An error is then recorded,
                not raised.

        Raises:
            ConfigError, EngineError: a worker or an engine is of an unknown kind.
        """
        self._checked = checked
        self._wrong: dict[str, str] = {}
        """{argument: reason why it is left out}."""
        self.profilers = self._taken("engines", partial(profilers_of, engines), engines is not None) or []
        recorded = {
            profiler.replica or 0: profiler.workers for profiler in self.profilers if profiler.workers
        }
        is_fleet = workers is not None or bool(recorded)
        self.fleet = self._taken("workers", partial(load_fleet, workers, recorded), is_fleet)
        self.apart: list[str] = []
        """Names of workers whose files have to be fetched, because they write to a folder that this process
        does not see."""
        self._released = False

    def _taken(self, argument: str, take: Callable[[], T], is_given: bool) -> T | None:
        """Return the result of `take` for an argument, or None if the argument is not given, or left out."""
        try:
            return take() if is_given else None
        except ours(ConfigError, EngineError) as error:
            if not self._checked:
                raise
            self._wrong[argument] = str(error)
            return None

    def join(self, session: Session) -> None:
        """Connect workers and engines to the owner's session. Record those that are left out."""
        for argument, reason in self._wrong.items():
            session.manifest_part.fail(
                argument, reason, kind="engine" if argument == "engines" else "selection"
            )
        for profiler in self.profilers:
            session.sample_engine(profiler)
        self._session, self._group = session, EngineGroup(self.profilers, session)

    async def start(self) -> None:
        """Start all participants, and return once each has begun, failed, or used up its deadline."""
        deadline_s = self._session.config.budget.fanout_seconds
        await asyncio.gather(self._start_workers(deadline_s), self._group.start(deadline_s))

    async def stop(self, request: StopRequest, deadline_s: float) -> None:
        """Stop all participants that began, may have begun, or answered too late."""
        await asyncio.gather(self._stop_workers(request, deadline_s), self._group.stop(deadline_s))

    async def gather(self, left_s: Callable[[], float]) -> None:
        """Fetch the files of workers that are apart, and of engines on their hosts."""
        session, manifest_part = self._session, self._session.manifest_part
        self._group.outcomes.look_again()  # a shared disk may lag
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
                if outcome.name not in fetched:  # else it was asked for an engine's files; its own are here
                    _enter_fetched(manifest_part, outcome)
            self._group.outcomes.look_again()
            manifest_part.write()
            for path in (home.path_of(artifact.path) for artifact in remote):
                if path.exists() and sidecar_of(path).exists():
                    pipeline.artifact_done(path, None, manifest_part)
        self._release(home)

    def _release(self, home: Home) -> None:
        """Let the workers forget the capture, once all files are here and no engine's files may still
        come.
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
        """Return {worker or replica: `began`, or the reason why it takes no part}, after the start."""
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
    """Return the manifest's name for the files of a worker that is apart."""
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
                name=outcome.name, state=outcome.state, reason=outcome.reason or "", process=outcome.process
            )
            for outcome in outcomes
            if outcome.state != "ok"
        )
    )
    manifest_part.add_clocks(tuple(outcome.clock for outcome in outcomes if outcome.clock is not None))
