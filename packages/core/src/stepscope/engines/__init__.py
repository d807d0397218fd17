"""Profilers of inference engines, behind one Protocol. Found through the entry points `stepscope.engines`.

`protocol` has what an adapter implements, and docs/extending.md the steps to one. The adapters of vLLM and
SGLang are packages beside the core.
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
