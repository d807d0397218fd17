"""Engines of this process, which `instrument` entries of the kind `engine` have found, or which are recorded
for a capture in another process.

An engine is an engine object, the URL of a server, or the handle of a Ray actor that contains an engine.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

from stepscope.engines.protocol import EngineProfiler


class Registered(NamedTuple):
    """An engine of this process."""

    adapter: str
    engine: object
    replica: int | None
    """The framework's number of the engine, or None if no entry states one."""


class _Entry(NamedTuple):
    adapter: str
    engine: Callable[[], object | None]
    replica: int | None
    pid: int
    """Process in which the engine was registered, because a forked child does not have the parent's
    engines."""


_entries: list[_Entry] = []
"""All entries in the order of registration. Only `register` changes this list."""
_empty: set[tuple[str, int]] = set()
"""{(adapter, pid)} of entries whose call made no engine in that process. Only `register_none` changes this
set."""


def register(adapter: str, engine: object, replica: int | None) -> None:
    """Keep `engine` for captures: a weak reference to it, or the string itself if it is a URL. A later call
    for the same engine replaces the earlier entry.

    Raises:
        TypeError: `engine` allows no weak references.
    """
    reference = partial(str, engine) if isinstance(engine, str) else weakref.ref(engine)
    entry = _Entry(adapter, reference, replica, os.getpid())
    _entries[:] = [known for known in _entries if not _is_replaced(known.engine(), engine)]
    _entries.append(entry)


def register_none(adapter: str) -> None:
    """Note that a call of an entry for this adapter has made no engine in this process."""
    _empty.add((adapter, os.getpid()))


def adapters() -> set[str]:
    """Return the adapters of this process' living engines, and of entries whose call made no engine."""
    named = {adapter for adapter, pid in _empty if pid == os.getpid()}
    return named | {engine.adapter for engine in registered()}


def _is_replaced(known: object | None, engine: object) -> bool:
    return known is None or known is engine or (isinstance(engine, str) and known == engine)


def registered(adapter: str | None = None) -> list[Registered]:
    """Return the living engines of one adapter, by default of all adapters, in the order of registration."""
    pairs = [(entry, entry.engine()) for entry in list(_entries) if entry.pid == os.getpid()]
    return [
        Registered(entry.adapter, engine, entry.replica)
        for entry, engine in pairs
        if engine is not None and adapter in (None, entry.adapter)
    ]


def replica_of(adapter: str, replica: int) -> object | None:
    """Return the adapter's only engine, whatever its number. If there are several engines, return the engine
    with the number `replica`, or None.
    """
    engines = registered(adapter)
    if len(engines) > 1:
        engines = [engine for engine in engines if engine.replica == replica]
    return engines[0].engine if len(engines) == 1 else None


Join: TypeAlias = Callable[[EngineProfiler], None]
_driven: dict[int, EngineProfiler] = {}
"""{id(profiler): profiler} of the engines that are recorded now. Writers: `begin`, `end`."""
_join: Join | None = None
"""Function called with the profiler of each engine whose recording begins, or None. One writer: `tell`."""
_seated: dict[int, EngineProfiler] = {}
"""{id(profiler): profiler} of the engines that another process drives through this process (`RayRollout`),
whether they are recorded now or not. One writer: `seat`."""


def begin(profiler: EngineProfiler) -> None:
    """Note that the recording of an engine begins."""
    _driven[id(profiler)] = profiler
    if _join is not None:
        _join(profiler)


def end(profiler: EngineProfiler) -> None:
    """Note that the recording of an engine ends."""
    _driven.pop(id(profiler), None)


def seat(profiler: EngineProfiler, *, instead_of: EngineProfiler | None) -> None:
    """Note the profiler of an engine that another process drives, in place of an earlier profiler of the same
    seat.
    """
    if instead_of is not None:
        _seated.pop(id(instead_of), None)
    _seated[id(profiler)] = profiler


def seated() -> tuple[EngineProfiler, ...]:
    """Return the profilers that `seat` has noted, in the order of the calls."""
    return tuple(_seated.values())


def tell(join: Join) -> None:
    """Call `join` with the profiler of each engine that is being recorded now, or whose recording begins
    later. A second call of this function replaces the first `join`.

    `join` may be called twice with an engine whose recording begins during this call.
    """
    global _join
    _join = join
    for profiler in tuple(_driven.values()):
        join(profiler)
