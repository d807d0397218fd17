"""Torch traces of known content, as Kineto writes them, for tests of what is read from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder

BASE_NS = OPENED_NS - 10_000_000_000
"""The zero of `ts` in these traces: 10 s before the step."""


def event(name: str, cat: str, start: float, dur: float, pid: int | str = 1, tid: int | str = 1) -> Any:
    """Return a complete event; times in us."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur,
        "args": {"External id": 7, "Input Dims": [[1, 2], []], "nested": [{"ph": "X"}, {"ph": "}"}]},
    }  # fmt: skip


def op(name: str, start: float, dur: float, tid: int = 1) -> Any:
    return event(name, "cpu_op", start, dur, tid=tid)


def kernel(name: str, start: float, dur: float, device: int = 0, stream: int = 7) -> Any:
    return event(name, "kernel", start, dur, device, stream)


def memory(ts: float, allocated: int, reserved: int = 0, kind: int = 1, device: int = 0) -> Any:
    args = {
        "Total Allocated": allocated, "Total Reserved": reserved, "Device Type": kind, "Device Id": device,
    }  # fmt: skip
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": args,
    }


def trace_text(events: list[Any], **fields: Any) -> bytes:
    whole = {"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": BASE_NS, **fields}
    return json.dumps({**whole, "traceEvents": events}).encode()


def write_trace(path: Path, events: list[Any], **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = trace_text(events, **fields)
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def put(
    folder: StepFolder, name: str, process: FakeProcess | None, content: bytes | None, *,
    sidecar: Mapping[str, Any] | None = None, **artifact: Any,
) -> Path:  # fmt: skip
    """Write a file of a step, and the sidecar of it. `content` None: the file is there."""
    path, key = folder.layout.root / name, None
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    made: dict[str, Any] = {"kind": "torch_trace", "tool": "torch", "size_bytes": path.stat().st_size}
    if process is not None:
        info, key = process.info, process.info.key
        made |= {"role": info.role, "rank": info.rank, "host": info.host, "pid": info.pid}
    described: dict[str, Any] = {"process": key, "opened": None, "closed": None, **(sidecar or {})}
    file = Artifact(path=name, **{**made, **artifact})
    record = Sidecar(step=folder.step, run_id=folder.run_id, artifact=file, **described)
    sidecar_of(path).write_bytes(msgspec.json.encode(record))
    return path


def add_trace(
    folder: StepFolder, process: FakeProcess, events: list[Any], *, options: dict[str, Any] | None = None,
    ignored: dict[str, str] | None = None, name: str = "trace", stage: str | None = None,
    replica: int | None = None, topology: dict[str, int] | None = None, **fields: Any,
) -> Path:  # fmt: skip
    """Put a process' trace with its sidecar into a step's folder. `ts` is given after the opening."""
    for event in events:
        event["ts"] += (OPENED_NS - BASE_NS) / 1000
    sidecar = {"options": options or {"activities": "cpu,cuda"}, "versions": {"torch": "2.13.0"}}
    return put(
        folder, f"traces/{process.info.role}/{name}_pid{process.info.pid}.json.gz", process,
        gzip.compress(trace_text(events, **fields)), sidecar=sidecar, stage=stage, replica=replica,
        topology=topology, ignored=ignored or {},
    )  # fmt: skip
