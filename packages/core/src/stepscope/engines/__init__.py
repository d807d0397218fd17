"""Profilers of inference engines, behind one Protocol. Found through the entry points `stepscope.engines`."""

from __future__ import annotations

from stepscope.engines.protocol import (
    EngineCapture,
    EngineFactory,
    EngineProfiler,
    EngineProfilerBase,
    Iterations,
    installed,
    load_engine,
    patience_s,
    recognise,
    refuse_second_start,
)

__all__ = [
    "EngineCapture",
    "EngineFactory",
    "EngineProfiler",
    "EngineProfilerBase",
    "Iterations",
    "installed",
    "load_engine",
    "patience_s",
    "recognise",
    "refuse_second_start",
]
