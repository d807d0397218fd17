"""Tables of an SQLite export of Nsight Systems, and the meaning of their values.

Written from the published schema ("SQLite Schema Reference" of the Nsight Systems guide, schema versions 2
and 3). A serialized id is <hardware 8><VM 8><process 24><thread 24> bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
START = "TARGET_INFO_SESSION_START_TIME"
PROCESS = ~0xFFFFFF
"""Mask of the process in a serialized thread id, the same as in `globalPid`."""
DIAGNOSTIC = "DIAGNOSTIC_EVENT"
WARNING, ERROR = 2, 3
"""DIAGNOSTIC_EVENT.severity."""
MARK, THREAD_NAME, DOMAIN, PUSH_POP, START_END = 34, 39, 75, (59, 70), (60, 71)
"""NVTX_EVENTS.eventType; 70 and 71 are ranges that were imported as text."""


class Device(NamedTuple):
    """Table of activity on devices."""

    table: str
    category: str
    names: tuple[str, ...]
    """Columns with the id of the event's name, the best one first."""
    args: Mapping[str, str]
    """Column of each argument. The arguments have Kineto's names if it has them."""


_WHERE = {"device": "deviceId", "context": "contextId", "stream": "streamId", "correlation": "correlationId"}
DEVICES = (
    Device(
        "CUPTI_ACTIVITY_KIND_KERNEL", "kernel", ("demangledName", "shortName", "mangledName"),
        {
            **_WHERE, **{size + axis: size + axis for size in ("grid", "block") for axis in "XYZ"},
            "registers per thread": "registersPerThread", "shared memory": "dynamicSharedMemory",
            "graph node": "graphNodeId",
        },
    ),
    Device(
        "CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", (),
        {**_WHERE, "bytes": "bytes", "kind": "copyKind", "graph node": "graphNodeId"},
    ),
    Device(
        "CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", (),
        {**_WHERE, "bytes": "bytes", "value": "value", "graph node": "graphNodeId"},
    ),
    # With --cuda-graph-trace=graph, the default, these rows stand for all kernels and copies of a graph.
    Device(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernel", (),
        {**_WHERE, "graph": "graphId", "graph exec": "graphExecId"},
    ),
)  # fmt: skip


def pid_of(process: int) -> int:
    """Return the OS pid in a serialized id."""
    return process >> 24 & 0xFFFFFF


def unnamed(device: Device, args: Mapping[str, object]) -> str:
    """Return the name of an event whose table has no names."""
    if device.category == "gpu_memcpy":
        return f"Memcpy {args['kind']}" if "kind" in args else "Memcpy"
    if device.table.endswith("GRAPH_TRACE"):
        return f"CUDA graph {args.get('graph', 'unknown')}"
    return "Memset" if device.category == "gpu_memset" else "(no name)"


def grouped(args: dict[str, Any]) -> dict[str, Any]:
    """Convert grid and block into lists, as in Kineto."""
    for word in ("grid", "block"):
        if all(f"{word}{axis}" in args for axis in "XYZ"):
            args[word] = [args.pop(f"{word}{axis}") for axis in "XYZ"]
    return args
