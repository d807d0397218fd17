"""A run with one step and a file of every kind that is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec

from packages.report.tests.test_reader_nsys import tables
from packages.report.tests.test_reader_nsys import write as write_export
from packages.report.tests.traces import event, kernel, op
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.requests import Answer, Control, Listening, Request
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder

MS = 1_000_000
CONFIG = """
save_path: out
steps: [2, "10:50:10"]
roles: {actor: {ranks: [0, 8]}, "*": {ranks: first}}
torch: {activities: [cpu], schedule: {active: 2}}
budget: {seconds: 3}
"""

LATENCIES = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
SPAN = {
    "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
    "spanId": "00f067aa0ba902b7",
    "parentSpanId": "11f067aa0ba902b7",
    "name": "llm_request",
    "startTimeUnixNano": str(OPENED_NS + 5 * MS),
    "endTimeUnixNano": str(OPENED_NS + 9 * MS),
    "status": {"code": 2},
    "attributes": [
        {"key": "gen_ai.request.id", "value": {"stringValue": "r"}},
        {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "7"}},
        *({"key": f"gen_ai.latency.{name}", "value": {"doubleValue": 0.001}} for name in LATENCIES),
    ],
}
RESOURCE = {"attributes": [{"key": "process.pid", "value": {"intValue": "7"}}]}
REQUEST = {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"scope": {}, "spans": [SPAN]}]}]}
REQUESTS = json.dumps(REQUEST).encode() + b"\n" + json.dumps(REQUEST).encode() + b"\n"


def write_whole_run(root: Path) -> Path:
    """Return a run at `root`."""
    folder = StepFolder(root)
    actor, ref = folder.process("actor", 0, owner=True), folder.process("ref", 1, skew_ns=MS, host="host-b")
    for process in (actor, ref):
        work = process.span("work", MS, 20 * MS)
        attrs: dict[str, str | int | float | bool | None] = {"request_id": "r", "tokens": 5}
        process.span("turn", 2 * MS, 9 * MS, parent=work, trajectory="t", turn=1, attrs=attrs)
        process.span("never", 3 * MS, None)
        process.close(30 * MS)
    actor.measures(ref, 4 * MS, uncertainty_ns=1000)
    step = folder.write()
    events = [op("aten::mm", 1000, 500), kernel("gemm", 1200, 300), event("nccl", "kernel", 2000, 100)]
    ends = [
        {"ph": phase, "id": 1, "pid": 1, "tid": 1, "ts": 1000 + at, "cat": "ac2g", "name": "ac2g", "bp": "e"}
        for phase, at in (("s", 0), ("f", 200))
    ]
    fields = {"baseTimeNanoseconds": OPENED_NS, "distributedInfo": {"rank": 0, "world_size": 2}}
    trace = json.dumps({**fields, "traceEvents": [*events, *ends]}).encode()
    put(step, "traces/actor/a.json", actor, trace)
    put(step, "traces/ref/b.json.gz", ref, gzip.compress(trace))
    exported = write_export(root / "export.sqlite", tables())
    put(step, "traces/actor/c.sqlite", actor, exported.read_bytes())
    exported.unlink()
    layout = RunLayout(root)
    layout.otel.mkdir()
    (layout.otel / "spans.jsonl").write_bytes(REQUESTS)
    asked = Request(id="0123abcd", steps="next", created_ns=1, expires_ns=2**61)
    layout.control.write_bytes(msgspec.json.encode(Control(requests=[asked])))
    layout.listeners.mkdir()
    answers = {"0123abcd": Answer(state="heard", steps=[1])}
    hears = Listening(host="h", pid=1, role="actor", rank=0, since_ns=1, step=1, answers=answers)
    layout.listener("h", 1).write_bytes(msgspec.json.encode(hears))
    (root / "run.json").write_text('{"format": 1, "run_id": "run1"}')
    (root / "config.yaml").write_text(CONFIG)
    return root


def put(step: Path, name: str, process: FakeProcess, data: bytes) -> None:
    """A trace and its sidecar."""
    path, info = step / name, process.info
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    artifact = Artifact(
        path=name, kind="trace", tool="t", role=info.role, rank=info.rank, host=info.host, size_bytes=1
    )
    sidecar = Sidecar(
        step=2,
        run_id="run1",
        artifact=artifact,
        process=info.key,
        opened=process.anchor(0),
        closed=process.anchor(30 * MS),
    )
    sidecar_of(path).write_bytes(msgspec.json.encode(sidecar))
