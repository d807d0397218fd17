"""Adapter for SGLang: starts and stops SGLang's profiler with a capture.

`capture(engines=...)` finds this adapter for an `sglang.Engine` or a TokenizerManager. For a server, pass
`SglangServer(url)`; for an engine in a Ray actor, `RayRollout(actor, "sglang")`. The `engine` extra of this
distribution states the supported range of SGLang. Importing this package does not import sglang.

    _driving      reads an engine's facts, and calls an engine of this process
    _capture      holds the captures of one engine
    _engine_side  runs in SGLang's own processes
    _files        reads the files of SGLang's profilers
    _server       calls an engine over HTTP
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
    # The modules are loaded on first use, because their imports (asyncio, http) take 40 ms.
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope_sglang' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"stepscope_sglang.{_HOMES[name]}"), name)
