"""Profilers of inference engines behind one Protocol. Adapters are found by entry points `stepscope.engines`.

`protocol` defines what an adapter implements; docs/extending.md shows how to write an adapter. The adapters
of vLLM and SGLang are separate packages.
"""

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
from stepscope.engines.settings import name_settings

__all__ = [
    "EngineCapture",
    "EngineFactory",
    "EngineProfiler",
    "EngineProfilerBase",
    "Iterations",
    "installed",
    "load_engine",
    "name_settings",
    "patience_s",
    "recognise",
    "refuse_second_start",
]
