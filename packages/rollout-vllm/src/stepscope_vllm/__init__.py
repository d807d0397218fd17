"""Adapter for vLLM: starts and stops vLLM's profiler with a capture.

The `engine` extra of this distribution states the supported range of vLLM. Importing this package does not
import vLLM.

    _arming       enables the profiler of engines while they are built
    _driving      reads an engine's facts, and calls an engine of this process
    _capture      holds the captures of one engine
    _engine_side  runs in vLLM's own processes
    _files        reads and moves the files of vLLM's profilers
    _server       calls an engine over HTTP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepscope_vllm._arming.environment import engine_args, engine_env, engine_environment, server_args
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
"""{name: module}. A module is loaded on first use, because the modules import asyncio, and a worker needs
only the extension."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
