"""Engines of a program that nobody edits: those that its `instrument` entries lead to or have found."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from stepscope.config import ProfileConfig
from stepscope.engines import EngineCapture, EngineProfiler, EngineProfilerBase, installed, load_engine
from stepscope.engines.instrumented_engines import registered
from stepscope.engines.protocol import ADAPTERS
from stepscope.engines.ray import RayRollout
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope.recording.process import failures, private_loop

_ASK_S = 5.0
"""Longest wait for an actor to say its engine's number."""
_numbers: dict[str, dict[str, list[int | None]]] = {}
"""Id of an actor -> {adapter: numbers} of its engines, once it has said some. One writer: `UneditedEngines`.

No handles: an actor ends when the last one is gone.
"""


class UnusableEngine(EngineProfilerBase):
    """An engine that cannot be recorded, with the reason. The capture goes on without it."""

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
    """Profilers of the engines of one step: `profilers`, for its capture."""

    def __init__(self, groups: Mapping[str, object], config: ProfileConfig) -> None:
        """
        Args:
            groups: {adapter: engines, URLs of servers, or Ray actors that hold an engine}.
        """
        self._config = config
        self.profilers: list[EngineProfiler] = []
        self._rollouts: list[tuple[str, RayRollout]] = []
        here = [(item.adapter, item.engine, item.replica) for item in registered()]
        known = {id(engine) for _, engine, _ in here}
        given = [(adapter, item) for adapter, group in groups.items() for item in _items(group)]
        for adapter, engine, replica in here:
            self._add(adapter, engine, replica)
        for adapter, item in given:
            if id(item) not in known:
                self._add(adapter, item, None)

    def number(self) -> None:
        """Give each engine the framework's number of it, or all of them their position. Blocks."""
        if self._rollouts:
            private_loop.run(self.anumber())
        else:
            self._position()

    async def anumber(self) -> None:
        """As `number`, without blocking the event loop."""
        await asyncio.gather(*(self._ask(rollout) for _, rollout in self._rollouts))
        for adapter, rollout in self._rollouts:
            self._take(adapter, rollout)
        self._position()

    def _add(self, adapter: str, item: object, replica: int | None) -> None:
        if adapter not in installed():
            failures.warn_once(f"engines of {adapter!r} are not recorded: no adapter. Fix: {ADAPTERS}")
            return
        actor = sys.modules.get("ray.actor")
        if actor is not None and isinstance(item, actor.ActorHandle):
            rollout = RayRollout(item, adapter)
            self._rollouts.append((adapter, rollout))
            self.profilers.append(rollout)
        else:
            profiler = _profiler(adapter, item, self._config)
            profiler.replica = replica
            self.profilers.append(profiler)

    async def _ask(self, rollout: RayRollout) -> None:
        if rollout.actor_id in _numbers:
            return
        try:
            numbers = await private_loop.within(rollout.numbers(), _ASK_S)
        except Exception:
            return  # its start says why
        if numbers:
            _numbers[rollout.actor_id] = numbers

    def _take(self, adapter: str, rollout: RayRollout) -> None:
        """Give `rollout` its number. Drop it if its actor's engines are of other adapters."""
        numbers = _numbers.get(rollout.actor_id)
        if numbers is None:
            return
        if adapter not in numbers:
            self.profilers.remove(rollout)
        elif len(numbers[adapter]) == 1:
            rollout.replica = numbers[adapter][0]

    def _position(self) -> None:
        numbers = [profiler.replica for profiler in self.profilers]
        if None in numbers or len(set(numbers)) < len(numbers):
            for profiler in self.profilers:
                profiler.replica = None


def _profiler(adapter: str, engine: object, config: ProfileConfig) -> EngineProfiler:
    try:
        factory = load_engine(adapter)
        if isinstance(engine, str):
            return factory.serving(engine, config)
        if factory.recognises(engine):
            return factory(engine, 0)
    except Exception as error:
        return UnusableEngine(failures.describe(error))
    kind = f"{type(engine).__module__}.{type(engine).__qualname__}"
    return UnusableEngine(
        f"the adapter {adapter!r} knows no {kind}. Fix: a path to the engine itself in the `instrument` entry"
    )


def _items(group: object) -> Sequence[object]:
    if isinstance(group, Mapping):
        return [group[key] for key in sorted(group)]
    return group if isinstance(group, list | tuple) else [group]
