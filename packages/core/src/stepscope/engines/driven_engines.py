"""Engines of this process that a capture in another process drives (`RayRollout`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stepscope.engines.protocol import EngineProfiler

Join: TypeAlias = Callable[[EngineProfiler], None]
_driven: dict[int, EngineProfiler] = {}
"""{id: profiler} of those that are recorded now. Writers: `begin`, `end`."""
_join: Join | None = None
"""Called with the profiler of each engine whose recording begins. One writer: `tell`."""
_seated: dict[int, EngineProfiler] = {}
"""{id: profiler} of those that the other process knows, recorded or not. One writer: `seat`."""


def begin(profiler: EngineProfiler) -> None:
    """Note that the recording of an engine begins."""
    _driven[id(profiler)] = profiler
    if _join is not None:
        _join(profiler)


def end(profiler: EngineProfiler) -> None:
    """Note that it ends."""
    _driven.pop(id(profiler), None)


def seat(profiler: EngineProfiler, *, instead_of: EngineProfiler | None) -> None:
    """Note an engine that the other process may record, in the place of an earlier one."""
    if instead_of is not None:
        _seated.pop(id(instead_of), None)
    _seated[id(profiler)] = profiler


def seated() -> tuple[EngineProfiler, ...]:
    """Return the profilers that were noted by `seat`."""
    return tuple(_seated.values())


def tell(join: Join) -> None:
    """Have `join` called with each engine that is recorded, now or later, in the place of an earlier one.

    With an engine that begins meanwhile it may be called twice.
    """
    global _join
    _join = join
    for profiler in tuple(_driven.values()):
        join(profiler)
