"""Torch traces of known content, as Kineto writes them, for tests of what is read from them."""

from __future__ import annotations

import gzip
import json
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
        "Total Allocated": allocated,
        "Total Reserved": reserved,
        "Device Type": kind,
        "Device Id": device,
    }
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


def add_trace(
    folder: StepFolder, process: FakeProcess, events: list[Any], *, options: dict[str, Any] | None = None,
    ignored: dict[str, str] | None = None, name: str = "trace", stage: str | None = None,
    replica: int | None = None, topology: dict[str, int] | None = None, **fields: Any,
) -> Path:  # fmt: skip
    """Put a process' trace with its sidecar into a step's folder. `ts` is given after the opening."""
    for event in events:
        event["ts"] += (OPENED_NS - BASE_NS) / 1000
    info = process.info
    path = folder.layout.traces / info.role / f"{name}_pid{info.pid}.json.gz"
    write_trace(path, events, **fields)
    artifact = Artifact(
        path=path.relative_to(folder.layout.root).as_posix(), kind="torch_trace", tool="torch",
        role=info.role, rank=info.rank, host=info.host, pid=info.pid, stage=stage, replica=replica,
        topology=topology, size_bytes=path.stat().st_size, ignored=ignored or {},
    )  # fmt: skip
    sidecar = Sidecar(
        step=folder.step, run_id=folder.run_id, artifact=artifact, process=info.key, opened=None, closed=None,
        options=options or {"activities": "cpu,cuda"}, versions={"torch": "2.13.0"},
    )  # fmt: skip
    sidecar_of(path).write_bytes(msgspec.json.encode(sidecar))
    return path
