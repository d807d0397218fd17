"""Reports of OTLP files without a step of stepscope, against the raw files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, some
from packages.report.tests.test_otlp import attributes, request_json
from packages.report.tests.test_otlp_recorded import AGENTS, RECORDED, raw_spans
from stepscope_report import step_report
from stepscope_report.cli import run
from stepscope_report.timeline.otlp_run import load_otlp

BEGAN_NS = 1_700_000_000 * 10**9
TRAJECTORIES = 20


def otlp_span(
    trace: int, number: int, parent: int, start_ms: float, end_ms: float, name: str, kind: str
) -> dict[str, object]:
    return {
        "traceId": f"{trace:08x}{1:024x}",
        "spanId": f"{trace * 16 + number:016x}",
        **({"parentSpanId": f"{trace * 16 + parent:016x}"} if parent else {}),
        "name": name,
        "startTimeUnixNano": str(BEGAN_NS + round(start_ms * MS)),
        "endTimeUnixNano": str(BEGAN_NS + round(end_ms * MS)),
        "attributes": attributes(**{"openinference.span.kind": {"stringValue": kind}}) if kind else [],
    }


def traces(folder: Path, kind: str) -> Path:
    """Write a run: twenty agents begin together, and the last one's call of a model takes 800 ms more."""
    spans = []
    for trace in range(1, TRAJECTORIES + 1):
        length_ms = 200 + 800 * (trace == TRAJECTORIES)
        spans += [
            otlp_span(trace, 1, 0, 0, length_ms + 50, "solve", kind),
            otlp_span(trace, 2, 1, 10, 10 + length_ms, "chat", "LLM"),
            otlp_span(trace, 3, 1, 20 + length_ms, 40 + length_ms, "search", "TOOL"),
        ]
    resource = {"service.name": {"stringValue": "agent"}, "host.name": {"stringValue": "node-a"}}
    (folder / "traces.jsonl").write_text(json.dumps(request_json(*spans, **resource)) + "\n")
    return folder


@pytest.mark.parametrize("kind", ["AGENT", ""])
def test_trajectories_and_their_long_tail_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    report = step_report(load_otlp([traces(tmp_path, kind)]))
    assert report.health.complete, report.health.doubts
    assert report.breakdown.window_ns == 1050 * MS
    tail = some(report.long_tail)
    assert (tail.trajectories, tail.held_ns) == (TRAJECTORIES, 800 * MS)
    assert tail.worst[0].trajectory == f"solve {TRAJECTORIES:08x}"
    assert {wait.stage: wait.wall_ns for wait in tail.worst[0].waits}["generate"] == 1000 * MS
    assert report.cause is not None
    assert (report.cause.kind, report.cause.trajectory) == ("long-trajectory", tail.worst[0].trajectory)


def test_spans_named_trajectory_in_one_trace_are_trajectories(tmp_path: Path) -> None:
    """As trainers write them: one trace for each step, with the trajectories below a call."""
    spans = [
        otlp_span(1, 1, 0, 0, 1000, "train_step", ""),
        otlp_span(1, 2, 1, 0, 900, "generate_sequences", ""),
    ]
    for number, end_ms in enumerate((300, 320, 340, 900), 3):
        one = otlp_span(1, number, 2, 10, end_ms, "trajectory", "")
        spans.append({**one, "attributes": attributes(trajectory_id={"stringValue": f"t{number}"})})
        spans.append(otlp_span(2, number, 0, 10, end_ms, "search", "TOOL") | {"parentSpanId": one["spanId"]})
    (tmp_path / "traces.jsonl").write_text(json.dumps(request_json(*spans)) + "\n")
    tail = step_report(load_otlp([tmp_path])).long_tail
    assert tail is not None
    assert (tail.trajectories, tail.held_ns, tail.worst[0].trajectory) == (4, 560 * MS, "t6")


@pytest.mark.parametrize("name", AGENTS)
def test_each_recorded_call_has_its_length(name: str) -> None:
    raw = raw_spans(name)
    report = step_report(load_otlp([RECORDED / name / "otel"]))
    assert report.breakdown.window_ns == max(one.end_ns for one in raw) - min(one.start_ns for one in raw)
    lengths = sorted(one.end_ns - one.start_ns for one in raw)
    calls = {(row.role, row.stage): (row.calls, row.total_ns) for row in report.stages}
    assert sum(total_ns for _, total_ns in calls.values()) == sum(lengths)
    assert calls["agent_loop", "trajectory"] == (1, lengths[-1])
    assert report.long_tail is not None
    assert report.long_tail.trajectories == 1


def test_a_span_of_1970_is_left_out_and_counted(tmp_path: Path) -> None:
    path = traces(tmp_path, "AGENT") / "traces.jsonl"
    far = otlp_span(99, 1, 0, 0, 1, "far", "LLM")
    assert isinstance(far, dict)
    whole = {**far, "startTimeUnixNano": str(5 * 10**9)}
    path.write_text(path.read_text() + json.dumps(request_json(whole)) + "\n")
    report = step_report(load_otlp([tmp_path]))
    assert report.breakdown.window_ns == 1050 * MS
    assert any("traces.jsonl: spans" in doubt for doubt in report.health.doubts)


def test_the_command_prints_it_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = traces(tmp_path, "AGENT")
    assert run(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"OpenTelemetry spans of {folder.name}, 2023-11-14 22:13:20 UTC: 1.05 s")
    assert "uncaptured" not in printed
    assert "OpenTelemetry spans of" in (tmp_path / "page.html").read_text()
    assert run(["report", str(folder), "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["tracer"] == "OpenTelemetry"


def test_a_merge_of_spans_alone_names_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = traces(tmp_path, "AGENT")
    assert run(["merge", str(folder), "--output", str(tmp_path / "timeline.json.gz")]) == 2
    assert "stepscope report" in capsys.readouterr().err
    assert not (tmp_path / "timeline.json.gz").exists()
