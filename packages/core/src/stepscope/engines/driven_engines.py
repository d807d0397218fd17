"""Engines of this process that a capture in another process drives (`RayRollout`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stepscope.engines.protocol import EngineProfiler

Join: TypeAlias = Callable[[EngineProfiler], None]
_driven: dict[int, EngineProfiler] = {}
"""{id: profiler} of the engines that are recorded now. Writers: `begin`, `end`."""
_join: Join | None = None
"""Function called with the profiler of each engine whose recording begins, or None. One writer: `tell`."""
_seated: dict[int, EngineProfiler] = {}
"""{id: profiler} of the engines that the other process knows, recorded or not. One writer: `seat`."""


def begin(profiler: EngineProfiler) -> None:
    """Record that the recording of an engine begins."""
    _driven[id(profiler)] = profiler
    if _join is not None:
        _join(profiler)


def end(profiler: EngineProfiler) -> None:
    """Record that the recording of an engine ends."""
    _driven.pop(id(profiler), None)


def seat(profiler: EngineProfiler, *, instead_of: EngineProfiler | None) -> None:
    """Record an engine that the other process may record, in place of an earlier profiler of the same
    engine.
    """
    if instead_of is not None:
        _seated.pop(id(instead_of), None)
    _seated[id(profiler)] = profiler


def seated() -> tuple[EngineProfiler, ...]:
    """Return the profilers recorded by `seat`."""
    return tuple(_seated.values())


def tell(join: Join) -> None:
    """Set the function that is called with each engine that is recorded, now or later. It replaces an earlier
    one.

    It may be called twice with an engine whose recording begins meanwhile.
    """
    global _join
    _join = join
    for profiler in tuple(_driven.values()):
        join(profiler)
