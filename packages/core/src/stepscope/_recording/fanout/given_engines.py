"""Profilers of the engines that were passed to a capture, numbered by replica."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stepscope._recording.process import identity
from stepscope.config._words import closest
from stepscope.engines import EngineProfiler, installed, load_engine, recognise
from stepscope.engines.protocol import ADAPTERS
from stepscope.errors import ConfigError, EngineError


def profilers_of(engines: object) -> list[EngineProfiler]:
    """Return one profiler per replica, numbered in the order given.

    Processes that a launcher (torchrun) started number their engines consecutively: each has its own engines,
    unless several processes hold a replica together.

    Args:
        engines: As `capture` takes them; the name of an adapter stands for the engines of its kind in this
            process.

    Raises:
        ConfigError: two engines have the same replica number, a name stands for no engine, or an engine is a
            Ray actor.
        EngineError: no installed adapter recognises one of the engines.
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
        allowed = f"the name of an installed adapter ({', '.join(names) or 'none'}), or {objects}"
        near = closest(name, names)
        fix = f"did you mean {near!r}?" if near else f"install the adapter of that engine: {ADAPTERS}"
        raise ConfigError("capture(engines=)", name, allowed, fix)
    engines = load_engine(name).owned()
    if not engines:
        raise ConfigError(
            "capture(engines=)", name, f"the name of an engine in this process, which has none, or {objects}",
            "pass the engines themselves; for those in other processes RayRollout(actor) or a server",
        )  # fmt: skip
    return engines
