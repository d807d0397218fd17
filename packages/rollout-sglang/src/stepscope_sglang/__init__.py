"""Adapter for SGLang: starts and stops SGLang's profiler with a capture.

`capture(engines=...)` finds this adapter by itself for an `sglang.Engine` or a TokenizerManager. Name a
server with `SglangServer(url)`, an engine in a Ray actor with `RayRollout(actor, "sglang")`. The supported
range of SGLang is the `engine` extra of this distribution. Nothing here imports sglang unless its user has
imported it.

    _driving      knows an engine's facts, and calls it in this process or over HTTP
    _capture      holds the captures of one engine
    _engine_side  runs in SGLang's own processes
    _files        reads what SGLang's profilers wrote
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope_sglang._profiler import SglangProfiler
    from stepscope_sglang._requests import record_request, request_facts
    from stepscope_sglang._server import SglangServer

__all__ = ["SglangProfiler", "SglangServer", "record_request", "request_facts"]

_HOMES = {
    "SglangProfiler": "_profiler",
    "SglangServer": "_server",
    "record_request": "_requests",
    "request_facts": "_requests",
}


def __getattr__(name: str) -> object:
    # Loaded on first use: their imports (asyncio, http) take 40 ms in a training process.
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope_sglang' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"stepscope_sglang.{_HOMES[name]}"), name)
