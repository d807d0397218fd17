"""Drives the profiler of SGLang from stepscope: engines of this process, servers, and engines in Ray actors.

`capture(engines=...)` finds this adapter by itself for an `sglang.Engine` or a TokenizerManager. A server is
named with `SglangServer(url)`, an engine in a Ray actor with `RayRollout(actor, "sglang")`. The supported
range of SGLang is the `engine` extra of this distribution. sglang itself is imported by nothing here unless
its user has imported it.
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
    # Loaded when asked for: what they need (asyncio, http) costs a training process 40 ms.
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope_sglang' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"stepscope_sglang.{_HOMES[name]}"), name)
