"""Profilers of inference engines, behind one Protocol. Found through the entry points `stepscope.engines`."""

from __future__ import annotations

from stepscope.engines.protocol import (
    EngineCapture,
    EngineFactory,
    EngineProfiler,
    Iterations,
    installed,
    load_engine,
    patience_s,
    recognise,
)

__all__ = [
    "EngineCapture",
    "EngineFactory",
    "EngineProfiler",
    "Iterations",
    "installed",
    "load_engine",
    "patience_s",
    "recognise",
]
