"""stepscope's side of vLLM: its profiler, started and stopped with a capture.

The supported range of vLLM is the `engine` extra of this distribution. vLLM is imported by nothing here
unless its user has imported it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepscope_vllm._arming.arguments import engine_args, server_args
from stepscope_vllm._arming.environment import engine_env, engine_environment
from stepscope_vllm._engine_side.extension import WorkerExtension
from stepscope_vllm._requests import record_request, request_facts

if TYPE_CHECKING:
    from stepscope_vllm._profiler import VllmProfiler
    from stepscope_vllm._server import VllmServer

__all__ = [
    "VllmProfiler",
    "VllmServer",
    "WorkerExtension",
    "engine_args",
    "engine_env",
    "engine_environment",
    "record_request",
    "request_facts",
    "server_args",
]

_LAZY = {"VllmProfiler": "stepscope_vllm._profiler", "VllmServer": "stepscope_vllm._server"}
"""These bring asyncio, which a worker that wants its extension alone does not pay for."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
