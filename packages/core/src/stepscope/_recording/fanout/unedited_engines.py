"""Engines of an unedited program, which are found by `instrument` entries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from stepscope._recording.process import failures, private_loop
from stepscope.config import ProfileConfig
from stepscope.engines import EngineCapture, EngineProfiler, EngineProfilerBase, installed, load_engine
from stepscope.engines.local_engines import registered
from stepscope.engines.protocol import INSTALL_AN_ADAPTER
from stepscope.engines.ray import Instrumented, RayRollout, is_elsewhere
from stepscope.errors import EngineError, ours
from stepscope.files.sidecar import Artifact

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_ASK_S = 5.0
"""Longest wait for the answer of an actor that was asked for its engines."""
_answers: dict[str, Instrumented] = {}
"""{id of an actor: its engines}, once the actor has named its engines. Answers with handles are not kept,
because an actor ends when its last handle is deleted. One writer: `UneditedEngines`."""


class UnusableEngine(EngineProfilerBase):
    """Profiler of an engine that cannot be recorded. `check` raises with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    @property
    def world_size(self) -> int | None:
        return None

    def check(self) -> None:
        raise EngineError(self._reason)

    async def start(self, capture: EngineCapture) -> None:
        self.check()

    async def stop(self) -> list[Artifact]:
        return []


class UneditedEngines:
    """The engines of one step. A capture uses `profilers`."""

    def __init__(self, groups: Mapping[str, object], config: ProfileConfig) -> None:
        """Make a profiler for each engine.

        Args:
            groups: {adapter: engines, URLs of servers, or Ray actors that contain an engine}. If an actor's
                engine may belong to either of two adapters, the actor is listed under both.
        """
        self._config = config
        self.profilers: list[EngineProfiler] = []
        self._rollouts: list[tuple[str, RayRollout]] = []
        """(adapter, profiler) of actors that have not been asked for their engines yet."""
        self._known: set[object] = set()
        """(adapter, address) of the engines in `profilers`, so that each engine is recorded once."""
        for adapter, engine, replica in registered():
            self._add(adapter, engine, replica)
        usable = {
            id(item) for adapter in installed().keys() & groups.keys() for item in _items(groups[adapter])
        }
        for adapter, group in groups.items():
            for item in _items(group):
                if adapter in installed() or id(item) not in usable:
                    self._add(adapter, item, None)

    def number(self) -> None:
        """Set the replica number of each engine to the framework's number. If a number is unknown, engines
        are numbered by position. The call may block.
        """
        if self._rollouts:
            private_loop.run(self.anumber())
        else:
            self._position()

    async def anumber(self) -> None:
        """Do what `number` does, without blocking the event loop."""
        while self._rollouts:  # an actor may name further actors
            asked, self._rollouts = self._rollouts, []
            answers = await asyncio.gather(*(self._ask(rollout) for _, rollout in asked))
            for (adapter, rollout), answer in zip(asked, answers, strict=True):
                self._take(adapter, rollout, answer)
        self._position()

    def _add(self, adapter: str, item: object, replica: int | None) -> None:
        if adapter not in installed():
            _warn_of_absent(adapter)
            return
        profiler = _profiler(adapter, item, self._config)
        address: object = item if isinstance(item, str) else id(item)
        if isinstance(profiler, RayRollout):
            address = profiler.actor_id
        if (adapter, address) in self._known:
            return
        self._known.add((adapter, address))
        profiler.replica = replica
        self.profilers.append(profiler)
        if isinstance(profiler, RayRollout):
            self._rollouts.append((adapter, profiler))

    async def _ask(self, rollout: RayRollout) -> Instrumented:
        known = _answers.get(rollout.actor_id)
        if known is not None:
            return known
        try:
            answer = await private_loop.within(rollout.instrumented(), _ASK_S)
        except ours():
            return {}  # the start of its profiler will state the reason
        if answer and all(target is None for engines in answer.values() for _, target in engines):
            _answers[rollout.actor_id] = answer
        return answer

    def _take(self, adapter: str, rollout: RayRollout, answer: Instrumented) -> None:
        """Set the number of `rollout`, or replace `rollout` by the engines that its actor has named."""
        for other in answer.keys() - installed().keys():
            _warn_of_absent(other)
        engines = answer.get(adapter, [])
        elsewhere = [(number, target) for number, target in engines if target is not None]
        if answer and (elsewhere or not engines):
            self.profilers.remove(rollout)
        elif len(engines) == 1:
            rollout.replica = engines[0][0]
        for number, target in elsewhere:
            self._add(adapter, target, number)

    def _position(self) -> None:
        numbers = [profiler.replica for profiler in self.profilers]
        if None in numbers or len(set(numbers)) < len(numbers):
            for profiler in self.profilers:
                profiler.replica = None


def _warn_of_absent(adapter: str) -> None:
    failures.warn_once(f"engines of {adapter!r} are not recorded: no adapter. Fix: {INSTALL_AN_ADAPTER}")


def _profiler(adapter: str, engine: object, config: ProfileConfig) -> EngineProfiler:
    if is_elsewhere(engine) and not isinstance(engine, str):
        return RayRollout(cast("ActorHandle[Any]", engine), adapter)
    try:
        factory = load_engine(adapter)
        if isinstance(engine, str):
            return factory.serving(engine if "://" in engine else f"http://{engine}", config)
        if factory.recognises(engine):
            return factory(engine, 0)
    except ours() as error:
        return UnusableEngine(failures.describe(error))
    kind = f"{type(engine).__module__}.{type(engine).__qualname__}"
    return UnusableEngine(
        f"the adapter {adapter!r} knows no {kind}. Fix: a path to the engine itself in the `instrument` entry"
    )


def _items(group: object) -> Sequence[object]:
    if isinstance(group, Mapping):
        return [group[key] for key in sorted(group)]
    return group if isinstance(group, list | tuple) else [group]
