"""Spans of other tracers, out of OTLP JSON, in a step's timeline and report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.steps import MS, some
from stepscope.files.trace_context import SpanIds
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import step_report
from stepscope_report.timeline import Span, Timeline, load_step
from stepscope_report.timeline.readers.otlp import OtlpFile, read_otlp

RECORDED = Path(__file__).parent / "recorded_otel" / "vllm"
FOREIGN = "4bf92f3577b34da6a3ce929d0e0e4736"


class Step:
    """A step in which a turn of the driver lasts from 10 to 60 ms, and files of other tracers."""

    def __init__(self, root: Path) -> None:
        self.folder = StepFolder(root)
        self.driver = self.folder.process("trainer", owner=True)
        self.turn = self.driver.span("turn", 10 * MS, 60 * MS, trajectory="t7", turn=3, policy_version=5)
        self.driver.close(100 * MS)

    def context(self, span: int) -> tuple[str, str]:
        ids = SpanIds(self.folder.run_id, self.folder.step, self.driver.info.key)
        return ids.trace_id, ids.span_id(span)

    def write(self, *requests: object, name: str = "spans.jsonl", of_run: bool = False) -> Path:
        step = self.folder.write()
        folder = (step.parent if of_run else step) / "otel"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(request) + "\n" for request in requests))
        return step


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path / "run")


def span_json(start_ms: float, end_ms: float, **fields: object) -> dict[str, object]:
    times = {
        "startTimeUnixNano": str(OPENED_NS + int(start_ms * MS)),
        "endTimeUnixNano": str(OPENED_NS + int(end_ms * MS)),
    }
    return {"traceId": FOREIGN, "spanId": "00f067aa0ba902b7", "name": "tool", **times, **fields}


def attributes(**values: Mapping[str, object]) -> list[object]:
    return [{"key": key.replace("__", "."), "value": value} for key, value in values.items()]


def request_json(*spans: object, **resource: Mapping[str, object]) -> dict[str, object]:
    return {
        "resourceSpans": [
            {"resource": {"attributes": attributes(**resource)}, "scopeSpans": [{"spans": list(spans)}]}
        ]
    }


def foreign(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.process > 0]


PERF_COUNTER_NS = 17_160_947_714_004
FAR = {
    "from 1970": (PERF_COUNTER_NS, OPENED_NS + 60 * MS),
    "both in 1970": (PERF_COUNTER_NS, PERF_COUNTER_NS + 100 * MS),
    "until 2055": (OPENED_NS + 20 * MS, OPENED_NS + 29 * 365 * 86_400 * 1000 * MS),
    "ms instead of ns": (OPENED_NS // MS, OPENED_NS // MS + 60),
}


@pytest.mark.parametrize("wrong", FAR)
def test_a_span_far_from_the_step_takes_no_time_of_it_and_is_counted(
    step: Step, wrong: str, command: Command
) -> None:
    trace_id, turn = step.context(0)
    good = span_json(20, 50, traceId=trace_id, parentSpanId=turn)
    start_ns, end_ns = FAR[wrong]
    bad = {**good, "spanId": "00f067aa0ba902b8", "startTimeUnixNano": start_ns, "endTimeUnixNano": end_ns}
    path = step.write(request_json(good))
    before = command("report", path, "--json").json["steps"][0]["breakdown"]
    step.write(request_json(good, bad))
    after = command("report", path, "--json", code=3).json["steps"][0]
    assert after["breakdown"] == before
    (problem,) = after["health"]["broken"]
    assert (problem["file"], problem["lines"]) == ("otel/spans.jsonl", 1)


def test_a_span_below_our_turn_belongs_to_its_trajectory(step: Step) -> None:
    trace_id, parent = step.context(step.turn)
    span = span_json(20, 50, traceId=trace_id, parentSpanId=parent)
    timeline = load_step(step.write(request_json(span, service__name={"stringValue": "calculator"})))
    (tool,) = foreign(timeline)
    assert (tool.stage, tool.role, tool.parent) == ("tool", "calculator", 0)
    assert (tool.trajectory, tool.turn, tool.policy_version) == ("t7", 3, 5)
    assert tool.start_ns - timeline.window.start_ns == 20 * MS
    assert tool.dur_ns == 30 * MS


def test_a_span_of_ours_below_a_foreign_one_belongs_to_the_trajectory_too(step: Step) -> None:
    trace_id, parent = step.context(step.turn)
    environment = step.folder.process("env", 0)
    environment.span("reset", 30 * MS, 40 * MS, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
    environment.close(90 * MS)
    span = span_json(20, 50, traceId=trace_id, parentSpanId=parent)
    timeline = load_step(step.write(request_json(span)))
    reset = next(span for span in timeline.spans if span.stage == "reset")
    assert timeline.spans[some(reset.parent)].stage == "tool"
    assert (reset.trajectory, reset.turn) == ("t7", 3)


def test_a_file_of_the_run_gives_each_step_its_own_spans(step: Step) -> None:
    spans = [span_json(start, start + 5, spanId=f"{start:016x}") for start in (10, 80, 200, 90_000)]
    timeline = load_step(step.write(request_json(*spans), of_run=True))
    starts = [span.start_ns - timeline.window.start_ns for span in foreign(timeline)]
    assert starts == [10 * MS, 80 * MS]


def test_what_stepscope_sent_to_the_collector_does_not_come_back(step: Step) -> None:
    trace_id, own = step.context(step.turn)
    copied = request_json(span_json(10, 60, traceId=trace_id, spanId=own, name="turn"))
    of_writer = {
        "resourceSpans": [{"scopeSpans": [{"scope": {"name": "stepscope"}, "spans": [span_json(0, 100)]}]}]
    }
    assert foreign(load_step(step.write(copied, of_writer))) == []


def test_spans_without_a_host_say_that_their_clock_is_assumed(step: Step) -> None:
    timeline = load_step(step.write(request_json(span_json(20, 50))))
    clock = timeline.processes[1].clock
    assert (clock.alignment, clock.uncertainty_ns) == ("assumed", None)
    assert "the owner's" in some(clock.note)


def test_spans_of_a_host_of_the_step_are_moved_by_its_offset(step: Step) -> None:
    other = step.folder.process("actor", 0, host="host-b", skew_ns=7 * MS)
    other.close(100 * MS)
    step.driver.measures(other, 50 * MS, uncertainty_ns=1000)
    request = request_json(span_json(27, 57), host__name={"stringValue": "host-b.example.org"})
    timeline = load_step(step.write(request))
    (tool,) = (span for span in timeline.spans if span.stage == "tool")
    clock = timeline.processes[tool.process].clock
    assert clock.alignment == "measured"
    assert abs(tool.start_ns - timeline.window.start_ns - 20 * MS) <= some(clock.uncertainty_ns)


PROMPTS = attributes(
    gen_ai__prompt={"stringValue": "SECRET"},
    gen_ai__input__messages={"stringValue": "SECRET"},
    input__value={"stringValue": "SECRET"},
    output__value={"stringValue": "SECRET"},
    llm__token_ids={"arrayValue": {"values": [{"stringValue": "SECRET"}]}},
    gen_ai__tool__name={"stringValue": "search"},
    gen_ai__usage__output_tokens={"intValue": "12"},
)


BAD: dict[str, list[object]] = {
    "startTimeUnixNano": ["abc", "-5", 1.5, "9" * 40, 0, True, None],
    "endTimeUnixNano": ["1", []],
    "traceId": ["xyz", "", 7, "0" * 32, "ab" * 15],
    "spanId": [None, "00f067aa0ba902", {}],
    "parentSpanId": ["z" * 16],
    "name": [7, None],
    "attributes": ["x", [7], [{"key": 7}], [{"key": "a", "value": {"intValue": "1e9"}}]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_named_with_its_field_and_costs_its_span_alone(
    step: Step, name: str, value: object
) -> None:
    good = span_json(20, 50, spanId="11" * 8)
    timeline = load_step(step.write(request_json(span_json(20, 50, **{name: value}), good)))
    assert len(foreign(timeline)) == 1
    (problem,) = timeline.problems
    assert problem.file == "otel/spans.jsonl"
    assert (name in problem.what) or "a.intValue" in problem.what
    assert problem.lines == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"traceEvents": []}\n', "resourceSpans is missing among 'traceEvents'"),
        (b'{"resourceSpans": 7}\n', "resourceSpans is 7, no list of objects"),
        (b'{"resourceSpans": []}\nnonsense\n', "lines that are no OTLP request"),
    ],
)
def test_a_file_that_is_no_otlp_says_so(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    file = read_otlp(path, lambda span: True)
    assert file.spans == []
    assert what in next(iter(file.problems))


def test_a_file_of_another_kind_in_the_folder_is_named(step: Step) -> None:
    timeline = load_step(step.write(name="spans.pb"))
    (problem,) = timeline.problems
    assert re.search(r"'\.pb'; .*: \.json, \.jsonl", problem.what)


def read(path: Path) -> OtlpFile:
    return read_otlp(path, lambda span: True)


def test_a_document_over_many_lines_gives_the_same_spans(tmp_path: Path) -> None:
    request = request_json(span_json(1, 2, attributes=PROMPTS), host__name={"stringValue": "h"})
    one, other = tmp_path / "one.jsonl", tmp_path / "other.json"
    one.write_text(json.dumps(request))
    other.write_text(json.dumps(request, indent=2))
    assert read(one).spans == read(other).spans != []


def test_names_of_protobuf_are_refused_with_what_lacks(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"resource_spans": []}))
    (what,) = read(path).problems
    assert what.startswith("resourceSpans is missing ")
    assert "'resource_spans'" in what


# A real file of vLLM's.


def recorded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "run")) / "step_000002"


def test_a_request_of_vllm_hangs_below_the_turn_that_made_it(tmp_path: Path) -> None:
    timeline = load_step(recorded(tmp_path))
    requests = [span for span in timeline.spans if span.stage == "request"]
    assert [(span.trajectory, span.turn, span.role) for span in requests] == [
        ("t0", 0, "rollout"),
        ("t1", 0, "rollout"),
    ]
    for span in requests:
        turn = timeline.spans[some(span.parent)]
        assert turn.stage == "turn"
        assert turn.start_ns <= span.start_ns <= timeline.until_ns(span) <= timeline.until_ns(turn)


def test_the_phases_of_a_request_have_the_lengths_that_vllm_states(tmp_path: Path) -> None:
    timeline = load_step(recorded(tmp_path))
    index, request = next((at, span) for at, span in enumerate(timeline.spans) if span.stage == "request")
    below = {span.stage: span for span in timeline.spans if span.parent == index}
    assert {stage: span.dur_ns for stage, span in below.items()} == {
        "queue": 48_381, "prefill": 9_787_946, "decode": 59_249_285,
    }  # fmt: skip
    assert below["queue"].waits
    assert below["queue"].start_ns >= request.start_ns
    assert (request.attrs or {})["output_tokens"] == 8


def test_the_report_counts_the_engine_of_these_requests(tmp_path: Path) -> None:
    report = step_report(load_step(recorded(tmp_path)))
    (engine,) = report.engines
    assert (engine.requests, engine.prompt_tokens, engine.output_tokens) == (2, 12, 24)


def test_a_request_that_stepscope_recorded_too_has_its_phases_once(step: Step) -> None:
    turn = step.driver.span("turn", 10 * MS, 90 * MS, trajectory="t8", attrs={"request_id": "r1"})
    step.driver.span("decode", 20 * MS, 80 * MS, parent=turn, role="rollout")
    latency = {
        f"gen_ai__latency__{name}": {"doubleValue": 0.01}
        for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    }
    attrs = attributes(gen_ai__request__id={"stringValue": "r1"}, **latency)
    timeline = load_step(step.write(request_json(span_json(15, 85, attributes=attrs))))
    assert [span.stage for span in timeline.spans].count("decode") == 1
