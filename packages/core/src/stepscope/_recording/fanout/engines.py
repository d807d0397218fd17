"""The inference engines of one capture. They are started and stopped concurrently, each with its own
deadline.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence

import msgspec

from stepscope._recording.process import failures, fork, identity
from stepscope._recording.process.failures import describe
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.process.private_loop import within
from stepscope._recording.session import pipeline, selection
from stepscope._recording.session.session import Session
from stepscope.config import ProfileConfig, RoleConfig
from stepscope.engines import EngineCapture, EngineProfiler, Iterations
from stepscope.engines.actor_call import LEFT_BEHIND, ActorGoneError
from stepscope.engines.own_thread import own_thread
from stepscope.engines.protocol import close_window, open_window, waited_s
from stepscope.errors import ours
from stepscope.files.layout import RunLayout, StepLayout, sidecar_of
from stepscope.files.manifest import (
    AWAITED,
    IDLE,
    LATE,
    Expectation,
    Pending,
    State,
    awaited,
    cut_short,
    of_engine,
)
from stepscope.files.sidecar import Artifact


class EngineOutcomes:
    """Outcomes of replicas, which are entered as `replica N` into the owner's part of the manifest."""

    def __init__(self, layout: StepLayout, manifest_part: ManifestPart) -> None:
        self._layout = layout
        self._manifest_part = manifest_part
        self._elsewhere: set[str] = set()
        """Labels of engines with files that are not on this host and may still be fetched."""

    def look_again(self) -> None:
        """Check again for files that were on another host when the engine stopped."""
        for item in self._manifest_part.record.expected:
            if item.name in self._elsewhere:
                reason = self._not_here(item.artifacts) or cut_short(item.artifacts)
                state: State = "partial" if reason else "ok"
                kept = {
                    option: why
                    for option, why in item.ignored.items()
                    if reason or not option.startswith(LEFT_BEHIND)
                }
                self._manifest_part.expect(
                    msgspec.structs.replace(item, state=state, reason=reason, ignored=kept)
                )

    def await_late_files(self, label: str, reason: str) -> None:
        """Record that a stop failed or took too long, and that the engine's files may still come."""
        reason = f"{reason}; {AWAITED['late']}"
        self._manifest_part.expect(
            Expectation(name=label, kind="engine", state="pending", pending="late", reason=reason)
        )

    def enter(self, label: str, artifacts: Sequence[Artifact], ignored: dict[str, str]) -> None:
        self._manifest_part.expect(self._outcome(label, tuple(artifacts), ignored))
        for artifact in artifacts:
            path = self._layout.root / artifact.path
            # The sidecar may be on a disk of another host.
            if sidecar_of(path).exists():
                pipeline.artifact_done(path, None, self._manifest_part)

    def enter_late_stop(self, label: str, stopped: asyncio.Future[list[Artifact]]) -> None:
        """Record the outcome of a stop that ended after its deadline, and write the part and the manifest
        again.
        """
        try:
            artifacts = stopped.result()
        except ours() as error:
            self._manifest_part.fail(label, f"stop, after its deadline: {describe(error)}", kind="engine")
        else:
            # Not `profiler.ignored`, which may belong to a later capture.
            ignored = {k: v for artifact in artifacts for k, v in artifact.ignored.items() if k != LATE}
            self.enter(label, artifacts, ignored)
        self._manifest_part.write()
        self._manifest_part.fold(self._layout)

    def _outcome(self, label: str, artifacts: tuple[Artifact, ...], ignored: dict[str, str]) -> Expectation:
        if not artifacts and IDLE in ignored:
            idle = ignored.pop(IDLE)
            return Expectation(
                name=label, kind="engine", state="ok", idle=True, notes=(idle,), ignored=ignored
            )
        if not artifacts:
            state: State = "skipped" if "artifacts" in ignored else "missing"
            reason = ignored.get("artifacts", "the engine stopped and left no file")
            return Expectation(name=label, kind="engine", state=state, reason=reason, ignored=ignored)
        pending: Pending | None = None
        trouble = self._not_here(artifacts)
        if trouble is not None:
            self._elsewhere.add(label)
        elif LATE in ignored:
            trouble, pending = f"{ignored[LATE]}; {AWAITED['late']}", "late"
        return of_engine(label, artifacts, ignored, trouble, pending)

    def _not_here(self, artifacts: Sequence[Artifact]) -> str | None:
        """Return a reason that names the absent files and the host that has them, or None if all files are
        here.
        """
        absent = [artifact for artifact in artifacts if not (self._layout.root / artifact.path).exists()]
        if not absent:
            return None
        hosts = {artifact.host for artifact in absent} - {socket.gethostname()}
        others = ", ".join(sorted(filter(None, hosts)))
        hint = f". They are on {others}, below {self._layout.root} there" if others else ""
        return f"announced and not on disk: {', '.join(artifact.path for artifact in absent)}{hint}"


ROLE = "rollout"
"""The role whose settings (`ranks`, `engine`) apply to engines."""
_LONG_STOP_S = 108.0
"""Longest stop of an engine's profiler that users have reported, in s."""
_GRACE_S = 1.0
"""Longest wait for a cancelled stop to end."""
_late_stops: set[asyncio.Future[list[Artifact]]] = set()
"""Stops that are still running after their deadline, on the private loop. Writers: `EngineGroup`, each stop
at its end, and a forked child."""


def warn_of_long_stops(config: ProfileConfig) -> None:
    """Warn once, before engines are started, if their stops may take longer than their deadline."""
    match = config.role(ROLE)
    bounded = match is not None and match[1].engine.iterations.count is not None
    heavy = config.torch.with_stack or config.torch.profile_memory
    if heavy and not bounded and config.budget.fanout_seconds < _LONG_STOP_S:
        failures.warn_once(
            "engines serve nothing while they write their files, which stacks and memory make large: 25 to "
            f"{_LONG_STOP_S:g} s were seen, and a stop is waited for {config.budget.fanout_seconds:g} s. "
            f"Fix: roles.{ROLE}.engine.iterations.count, or a budget.fanout_seconds of {_LONG_STOP_S:g}"
        )


class EngineGroup:
    """All replicas of one capture."""

    def __init__(self, profilers: Sequence[EngineProfiler], session: Session) -> None:
        self._profilers = profilers
        self._session = session
        self._config = session.config
        self._manifest_part = session.manifest_part
        self._started: list[EngineProfiler] = []
        self.outcomes = EngineOutcomes(session.layout, session.manifest_part)

    async def start(self, deadline_s: float) -> None:
        """Start the selected replicas concurrently. A replica that hangs delays the other replicas by at most
        `deadline_s`.
        """
        self._say_unreachable_ranks()
        selected = [profiler for profiler in self._profilers if self._selects(profiler)]
        if selected:
            warn_of_long_stops(self._config)
        full = None
        try:
            await _give_up_late_stops()
            full = await own_thread(self._session.over_budget) if selected else None
        except ours() as error:  # for example a disk error, or no thread can be started
            failures.note("looking for room before a capture", error)
        if full is not None:
            for profiler in selected:
                self._manifest_part.fail(_label(profiler), full, kind="engine")
            return
        await asyncio.gather(*(self._start(profiler, deadline_s) for profiler in selected))

    async def stop(self, deadline_s: float) -> None:
        """Stop all started replicas concurrently. After a cancellation, a second call stops the remaining
        replicas.
        """
        await asyncio.gather(*(self._stop(profiler, deadline_s) for profiler in tuple(self._started)))

    def _say_unreachable_ranks(self) -> None:
        if identity.place()[1] > 1:
            # Each process of a launcher has other replicas, so another process may have these ranks.
            return
        sizes = [(_number(profiler), profiler.world_size) for profiler in self._profilers]
        for rank, reason in selection.unreachable_in_engines(self._config, ROLE, sizes).items():
            self._manifest_part.lack(f"{ROLE} rank {rank}", reason, kind="selection")

    def _selects(self, profiler: EngineProfiler) -> bool:
        reason = _unselected(self._config, profiler)
        if reason is not None:
            self._manifest_part.skip(_label(profiler), reason, kind="engine")
        return reason is None

    async def _start(self, profiler: EngineProfiler, deadline_s: float) -> None:
        label = _label(profiler)
        waited_s.set(deadline_s)  # sets the limit of this asyncio task only
        # Added before the start, so that a capture which is cancelled meanwhile stops this engine too.
        self._started.append(profiler)
        try:
            await within(_checked_start(profiler, self._capture_of(profiler)), deadline_s)
        except ours() as error:
            why = _why("start", error, deadline_s)
            self._manifest_part.fail(label, why, kind="engine", died=_is_death(error))
            return
        if profiler not in self._started:  # a stop came before the start had ended: stop again later
            self._started.append(profiler)
        self._manifest_part.expect(awaited(label, "engine", "closing"))

    async def _stop(self, profiler: EngineProfiler, deadline_s: float) -> None:
        label = _label(profiler)
        # An engine whose start failed is stopped too, to clean up, but its manifest entry keeps the reason of
        # the failed start.
        started = self._manifest_part.state(label) != "failed"
        waited_s.set(deadline_s)  # sets the limit of this asyncio task only
        stopping = asyncio.ensure_future(close_window(profiler))
        try:
            await asyncio.wait({stopping}, timeout=deadline_s)
        except asyncio.CancelledError:
            stopping.cancel()
            raise
        self._started.remove(profiler)
        if not stopping.done():
            self._await_late(label, stopping, deadline_s, started)
        elif started:
            self._enter_stopped(profiler, stopping, deadline_s)
        else:
            _heard(stopping)

    def _await_late(
        self, label: str, stopping: asyncio.Future[list[Artifact]], deadline_s: float, started: bool
    ) -> None:
        """Let a stop continue after its deadline, and record its outcome later."""

        def ended(stopped: asyncio.Future[list[Artifact]]) -> None:
            _late_stops.discard(stopped)
            if not started:
                _heard(stopped)
            elif not stopped.cancelled():
                self.outcomes.enter_late_stop(label, stopped)

        if started:
            self.outcomes.await_late_files(label, f"timeout: stop did not return within {deadline_s:g} s")
        _late_stops.add(stopping)
        stopping.add_done_callback(ended)

    def _enter_stopped(
        self, profiler: EngineProfiler, stopped: asyncio.Future[list[Artifact]], deadline_s: float
    ) -> None:
        label = _label(profiler)
        try:
            artifacts = stopped.result()
        except (Exception, asyncio.CancelledError) as error:
            reason = _why("stop", error, deadline_s)
            if profiler.ignored.get(LATE) is None:
                self._manifest_part.fail(label, reason, kind="engine", died=_is_death(error))
            else:
                self.outcomes.await_late_files(label, reason)
        else:
            self.outcomes.enter(label, artifacts, dict(profiler.ignored))

    def _capture_of(self, profiler: EngineProfiler) -> EngineCapture:
        session, layout = self._session, self._session.layout
        return _capture_of(self._config, profiler, session.step, session.run_id, layout)


def check_capture(config: ProfileConfig, profiler: EngineProfiler, run_id: str) -> Mapping[str, str]:
    """Return {option: reason} of options that have no effect on captures of a replica; empty if the replica
    is not selected. May block.

    Raises:
        EngineError: the replica cannot record with these options.
    """
    if _unselected(config, profiler) is not None:
        return {}
    layout = RunLayout(config.save_path).step(0)
    return profiler.check_capture(_capture_of(config, profiler, 0, run_id, layout))


def _capture_of(
    config: ProfileConfig, profiler: EngineProfiler, step: int, run_id: str, layout: StepLayout
) -> EngineCapture:
    match = config.role(ROLE)
    role = match[1] if match else RoleConfig()
    torch, window, replica = config.torch, role.engine.iterations, _number(profiler)
    return EngineCapture(
        step=step,
        run_id=run_id,
        seconds=config.budget.seconds,
        stop_seconds=config.budget.fanout_seconds,
        out_dir=os.path.abspath(layout.engine_dir(replica)),
        step_dir=os.path.abspath(layout.root),
        name=f"step_{step:06d}_{run_id}",
        replica=replica,
        activities=torch.activities,
        with_stack=torch.with_stack,
        record_shapes=torch.record_shapes,
        profile_memory=torch.profile_memory,
        iterations=Iterations(start=window.start, count=window.count, running=window.running),
        by_stage=role.engine.by_stage,
        merge=role.engine.merge,
        passes=role.engine.passes,
        profiler=role.engine.profiler is True,
        ranks=None if isinstance(role.ranks, str) else role.ranks,
        extra=role.engine.extra,
    )


async def _give_up_late_stops() -> None:
    """Cancel the stops of earlier captures that still run, before a new capture starts its engines. The
    adapters still write the traces of the earlier captures, and readers find these traces.
    """
    stops = tuple(_late_stops)
    for stop in stops:
        stop.cancel()
    if stops:
        await asyncio.wait(stops, timeout=_GRACE_S)


def _heard(stopped: asyncio.Future[list[Artifact]]) -> None:
    """Read the exception of a stop, because asyncio logs an exception that nobody has read."""
    if stopped.done() and not stopped.cancelled():
        stopped.exception()


async def _checked_start(profiler: EngineProfiler, capture: EngineCapture) -> None:
    await own_thread(profiler.check)  # on a thread, because it may block
    await open_window(profiler, capture)


def _why(verb: str, error: BaseException, deadline_s: float) -> str:
    if isinstance(error, asyncio.CancelledError):
        return f"{verb}: cancelled"
    if isinstance(error, asyncio.TimeoutError):
        return f"timeout: {verb} did not return within {deadline_s:g} s"
    return f"{verb}: {describe(error)}"


def _is_death(error: BaseException) -> bool:
    return isinstance(error, ActorGoneError) and error.died


def _unselected(config: ProfileConfig, profiler: EngineProfiler) -> str | None:
    """Return the reason why a replica is not selected, or None if it is.

    Replica r of size n has the global ranks [r*n, (r+1)*n).
    """
    match = config.role(ROLE)
    if match is None:
        return f"no pattern in roles matches role '{ROLE}'"
    pattern, ranks = match[0], match[1].ranks
    if not match[1].engine.profiler:
        return f"roles.{pattern}.engine.profiler is off"
    number, size = _number(profiler), profiler.world_size
    if ranks == "all":
        return None
    if ranks == "first":
        return None if number == 0 else f"roles.{pattern} selects the first rank, which is on replica 0"
    if size is None:
        return None  # the adapter selects ranks itself
    first = number * size
    if any(first <= rank < first + size for rank in ranks):
        return None
    return f"its ranks {first} to {first + size - 1} are not in roles.{pattern}.ranks {list(ranks)}"


def _number(profiler: EngineProfiler) -> int:
    """Return the number of the replica, which `profilers_of` has set."""
    return 0 if profiler.replica is None else profiler.replica


def _label(profiler: EngineProfiler) -> str:
    return f"replica {_number(profiler)}"


fork.forgets("late stops of engines", _late_stops.clear)
