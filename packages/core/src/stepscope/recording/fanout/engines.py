"""The inference engines of one capture: started and stopped at once, each with its own deadline.

One file above 400 lines: it holds every outcome of a replica, in time and late.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from stepscope.config import ProfileConfig, RoleConfig
from stepscope.engines import (
    EngineCapture,
    EngineProfiler,
    Iterations,
    installed,
    load_engine,
    recognise,
)
from stepscope.engines.fetch import LEFT_BEHIND
from stepscope.engines.own_thread import own_thread
from stepscope.engines.protocol import ADAPTERS, waited_s
from stepscope.errors import ConfigError, EngineError
from stepscope.files.layout import StepLayout, sidecar_of
from stepscope.files.manifest.late import waiting
from stepscope.files.manifest.records import (
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
from stepscope.recording.after import pipeline
from stepscope.recording.fanout import late_files
from stepscope.recording.output.manifest_part import Ledger
from stepscope.recording.process import failures, identity
from stepscope.recording.process.failures import describe
from stepscope.recording.process.private_loop import within
from stepscope.recording.session import selection

_LATE: Pending = "late"
ROLE = "rollout"
"""The role whose `ranks` and `engine` options apply to engines."""
_LONG_STOP_S = 108.0
"""The longest stop that users have reported."""


def profilers_of(engines: object) -> list[EngineProfiler]:
    """Return one profiler per replica, numbered in the order given.

    Processes that a launcher started (torchrun) number theirs one after the other: each has engines of its
    own, unless several hold a replica together.

    Args:
        engines: As `capture` takes them; the name of an adapter stands for the engines of its kind in this
            process.

    Raises:
        ConfigError: two have the same replica number, a name stands for nothing, or one is a Ray actor.
        EngineError: no installed adapter knows one of them.
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
    """Return the engines of this process that an adapter's name stands for."""
    objects = "the engine objects, RayRollout(actor) for those in Ray actors"
    if "://" in name:
        raise ConfigError(
            "capture(engines=)", name, f"an adapter's name, or {objects}",
            "say which engine serves there: its adapter has a profiler for servers, such as VllmServer(url)",
        )  # fmt: skip
    names = sorted(installed())
    if name not in names:
        raise ConfigError(
            "capture(engines=)", name, f"the name of an installed adapter ({', '.join(names) or 'none'}), or "
            f"{objects}", f"install the adapter of that engine: {ADAPTERS}",
        )  # fmt: skip
    engines = load_engine(name).owned()
    if not engines:
        raise ConfigError(
            "capture(engines=)", name, f"a name for engines in this process, which has none, or {objects}",
            "pass the engines themselves; for those in other processes RayRollout(actor) or a server",
        )  # fmt: skip
    return engines


def warn_of_long_stops(config: ProfileConfig) -> None:
    """Warn once that stops may take long, before any engine is started."""
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
    """All replicas of one capture. Every outcome is an expectation `replica N` in the owner's ledger."""

    def __init__(
        self,
        profilers: Sequence[EngineProfiler],
        *,
        config: ProfileConfig,
        layout: StepLayout,
        ledger: Ledger,
        step: int,
        name: str,
        over_budget: Callable[[], str | None],
    ) -> None:
        """Args: over_budget: why no trace should be added to the run's folder; None when there is room."""
        self._over_budget = over_budget
        self._profilers = profilers
        self._config = config
        self._layout = layout
        self._ledger = ledger
        self._step = step
        self._name = name
        self._started: list[EngineProfiler] = []
        self._elsewhere: set[str] = set()
        """Labels of engines that announced files which were not here: they may yet be fetched."""

    async def start(self, deadline_s: float) -> None:
        """Start the selected replicas concurrently. One that fails or hangs costs its deadline and nothing
        else.
        """
        self._say_unreachable_ranks()
        selected = [profiler for profiler in self._profilers if self._selects(profiler)]
        if selected:
            warn_of_long_stops(self._config)
        full = None
        try:
            await late_files.give_up()
            full = await own_thread(self._over_budget) if selected else None
        except Exception as error:  # of the disk, or of a process that may have no more threads
            failures.note("looking for room before a capture", error)
        if full is not None:
            for profiler in selected:
                self._ledger.fail(_label(profiler), full, kind="engine")
            return
        await asyncio.gather(*(self._start(profiler, deadline_s) for profiler in selected))
        await late_files.enter_what_came()  # an engine that has started is through with its last stop

    async def stop(self, deadline_s: float) -> None:
        """Stop those that started, concurrently. Cancelled, it leaves the others to a second call."""
        await asyncio.gather(*(self._stop(profiler, deadline_s) for profiler in tuple(self._started)))

    def look_again(self) -> None:
        """Enter files that were not here at the stop, and have been fetched since."""
        for item in self._ledger.part.expected:
            if item.name in self._elsewhere:
                reason = self._not_here(item.artifacts) or cut_short(item.artifacts)
                state: State = "partial" if reason else "ok"
                kept = {
                    option: why
                    for option, why in item.ignored.items()
                    if reason or not option.startswith(LEFT_BEHIND)
                }
                self._ledger.expect(msgspec.structs.replace(item, state=state, reason=reason, ignored=kept))

    def _say_unreachable_ranks(self) -> None:
        if identity.place()[1] > 1:
            return  # other processes have the other replicas
        sizes = [(_number(profiler), profiler.world_size) for profiler in self._profilers]
        for rank, reason in selection.unreachable_in_engines(self._config, ROLE, sizes).items():
            self._ledger.lack(f"{ROLE} rank {rank}", reason, kind="selection")

    def _selects(self, profiler: EngineProfiler) -> bool:
        reason = _unselected(self._config, profiler)
        if reason is not None:
            self._ledger.skip(_label(profiler), reason, kind="engine")
        return reason is None

    async def _start(self, profiler: EngineProfiler, deadline_s: float) -> None:
        label = _label(profiler)
        waited_s.set(deadline_s)  # in the task that this is
        # Listed before the start returns: a capture cancelled meanwhile must stop this one too.
        self._started.append(profiler)
        try:
            await within(_checked_start(profiler, self._capture_of(profiler)), deadline_s)
        except Exception as error:
            self._ledger.fail(label, _why("start", error, deadline_s), kind="engine")
            return
        if profiler not in self._started:  # it was told to stop before it had started: it is told again
            self._started.append(profiler)
        self._ledger.expect(awaited(label, "engine", "closing"))

    async def _stop(self, profiler: EngineProfiler, deadline_s: float) -> None:
        label = _label(profiler)
        # One that did not is stopped to leave nothing behind, and why it did not is what is worth knowing.
        started = self._ledger.state(label) != "failed"
        waited_s.set(deadline_s)  # in the task that this is
        stopping = asyncio.ensure_future(profiler.stop())
        try:
            await asyncio.wait({stopping}, timeout=deadline_s)
        except asyncio.CancelledError:
            stopping.cancel()
            raise
        if profiler not in self._started:
            return  # its loop stood still, and a second call has stopped it
        self._started.remove(profiler)
        if not stopping.done():
            if started:
                late_files.add(
                    stopping, partial(self._came_late, label), partial(self._came_by_itself, label)
                )
            else:
                late_files.add(stopping, _heard)
        if not started:
            _heard(stopping)
        elif not stopping.done():
            self._fail_for_now(label, f"timeout: stop did not return within {deadline_s:g} s")
        else:
            try:
                artifacts = stopping.result()
            except (Exception, asyncio.CancelledError) as error:
                late = profiler.ignored.get(LATE) is not None
                reason = _why("stop", error, deadline_s)
                if not late:
                    self._ledger.fail(label, reason, kind="engine")
                else:
                    self._fail_for_now(label, reason)
                    late_files.expect(partial(self._came_by_itself, label))
            else:
                self._enter(label, artifacts, dict(profiler.ignored))

    def _fail_for_now(self, label: str, reason: str) -> None:
        self._ledger.fail(label, f"{reason}; {AWAITED['late']}", kind="engine", pending="late")

    def _enter(self, label: str, artifacts: Sequence[Artifact], ignored: dict[str, str]) -> None:
        entered = {artifact.path for artifact in self._entered(label)}
        self._ledger.expect(self._outcome(label, tuple(artifacts), ignored))
        for artifact in artifacts:
            path = self._layout.root / artifact.path
            # Its sidecar may lie on another host's own disk.
            if artifact.path not in entered and sidecar_of(path).exists():
                pipeline.artifact_done(path, None, self._ledger)

    def _outcome(self, label: str, artifacts: tuple[Artifact, ...], ignored: dict[str, str]) -> Expectation:
        if not artifacts and IDLE in ignored:
            idle = ignored.pop(IDLE)
            return Expectation(
                name=label, kind="engine", state="ok", idle=True, notes=(idle,), ignored=ignored
            )
        if not artifacts and "artifacts" in ignored:
            reason = ignored["artifacts"]
            return Expectation(name=label, kind="engine", state="skipped", reason=reason, ignored=ignored)
        if not artifacts:
            reason = "the engine stopped and left no file"
            return Expectation(name=label, kind="engine", state="missing", reason=reason, ignored=ignored)
        trouble, pending = self._not_here(artifacts), None
        if trouble is not None:
            self._elsewhere.add(label)
        elif LATE in ignored:
            trouble, pending = f"{ignored[LATE]}; {AWAITED['late']}", _LATE
            late_files.expect(partial(self._came_by_itself, label))
        return of_engine(label, artifacts, ignored, trouble, pending)

    def _came_late(self, label: str, stopped: asyncio.Future[list[Artifact]]) -> None:
        """Enter the outcome of a stop that ended after its deadline."""
        try:
            artifacts = stopped.result()
        except Exception as error:
            self._ledger.fail(label, f"stop, after its deadline: {describe(error)}", kind="engine")
            self._write()
        else:
            self._enter_late(label, artifacts)

    def _came_by_itself(self, label: str) -> bool:
        """Enter files of a stop that nobody waits for any more. Blocks.

        Returns:
            Whether all have come, as far as one can tell: some are here, and no more since the last look.
        """
        part = self._ledger.part
        came = [
            artifact
            for late in waiting(self._layout)
            if (late.run_id, late.process, late.name) == (part.run_id, part.process.key, label)
            for artifact in late.came
        ]
        before = self._entered(label)
        if came:
            self._enter_late(label, [*before, *came])
        awaits = any(item.pending is not None for item in part.expected if item.name == label)
        return bool(before) and not came and not awaits

    def _entered(self, label: str) -> list[Artifact]:
        return [
            artifact
            for item in self._ledger.part.expected
            if item.name == label
            for artifact in item.artifacts
        ]

    def _enter_late(self, label: str, artifacts: Sequence[Artifact]) -> None:
        # Not the profiler's `ignored`: that may be of a later capture.
        ignored = {k: v for artifact in artifacts for k, v in artifact.ignored.items() if k != LATE}
        self._enter(label, artifacts, ignored)
        self._write()

    def _write(self) -> None:
        """Write this part and the manifest again, because the capture is closed."""
        self._ledger.write()
        try:
            self._ledger.fold(self._layout)
        except OSError as error:
            failures.note("writing the manifest", error)

    def _not_here(self, artifacts: Sequence[Artifact]) -> str | None:
        """Return the files that are not here, and where to look: a host may have a disk of its own at
        that path. None when all are.
        """
        absent = [artifact for artifact in artifacts if not (self._layout.root / artifact.path).exists()]
        if not absent:
            return None
        hosts = {artifact.host for artifact in absent} - {socket.gethostname()}
        where = ", ".join(sorted(filter(None, hosts)))
        hint = f". They are on {where}, below {self._layout.root} there" if where else ""
        return f"announced and not on disk: {', '.join(artifact.path for artifact in absent)}{hint}"

    def _capture_of(self, profiler: EngineProfiler) -> EngineCapture:
        match = self._config.role(ROLE)
        role = match[1] if match else RoleConfig()
        torch, window, replica = self._config.torch, role.engine.iterations, _number(profiler)
        return EngineCapture(
            step=self._step,
            run_id=self._ledger.part.run_id,
            seconds=self._config.budget.seconds,
            stop_seconds=self._config.budget.fanout_seconds,
            out_dir=os.path.abspath(self._layout.engine_dir(replica)),
            step_dir=os.path.abspath(self._layout.root),
            name=self._name,
            replica=replica,
            activities=torch.activities,
            with_stack=torch.with_stack,
            record_shapes=torch.record_shapes,
            profile_memory=torch.profile_memory,
            iterations=Iterations(start=window.start, count=window.count),
            by_stage=role.engine.by_stage,
            merge=role.engine.merge,
            ranks=None if isinstance(role.ranks, str) else role.ranks,
            extra=role.engine.extra,
        )


def _heard(stopped: asyncio.Future[list[Artifact]]) -> None:
    """Fetch the error of a stop, which asyncio would otherwise complain about."""
    if stopped.done() and not stopped.cancelled():
        stopped.exception()


async def _checked_start(profiler: EngineProfiler, capture: EngineCapture) -> None:
    await own_thread(profiler.check)  # it may block
    await profiler.start(capture)


def _why(verb: str, error: BaseException, deadline_s: float) -> str:
    if isinstance(error, asyncio.CancelledError):
        return f"{verb}: cancelled"
    if isinstance(error, asyncio.TimeoutError):
        return f"timeout: {verb} did not return within {deadline_s:g} s"
    return f"{verb}: {describe(error)}"


def _unselected(config: ProfileConfig, profiler: EngineProfiler) -> str | None:
    """Return why a replica takes no part; None when it does. Replica r of size n owns global ranks [r*n,
    (r+1)*n).
    """
    match = config.role(ROLE)
    if match is None:
        return f"no pattern in roles matches role '{ROLE}'"
    pattern, ranks = match[0], match[1].ranks
    number, size = _number(profiler), profiler.world_size
    if ranks == "all":
        return None
    if ranks == "first":
        return None if number == 0 else f"roles.{pattern} selects the first rank, which is on replica 0"
    if size is None:
        return None  # the adapter surfaces the wanted ranks once it knows its own
    first = number * size
    if any(first <= rank < first + size for rank in ranks):
        return None
    return f"its ranks {first} to {first + size - 1} are not in roles.{pattern}.ranks {list(ranks)}"


def _number(profiler: EngineProfiler) -> int:
    """Return the replica's number: `profilers_of` has seen to it that there is one."""
    return 0 if profiler.replica is None else profiler.replica


def _label(profiler: EngineProfiler) -> str:
    return f"replica {_number(profiler)}"
