"""Real files of OpenInference, pydantic-ai and SGLang in a step's timeline, against the raw files."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from packages.report.tests.steps import MS
from packages.report.tests.test_otlp import foreign
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import step_report
from stepscope_report.sections.engines import Engine
from stepscope_report.timeline import Span, Timeline, load_step, merge_step

RECORDED = Path(__file__).parent / "recorded_otel"
AGENTS = ("openinference", "pydantic_ai")


class Raw(NamedTuple):
    """A span as the file has it."""

    name: str
    start_ns: int
    end_ns: int
    span_id: str
    parent_id: str


def raw_spans(name: str) -> list[Raw]:
    (file,) = (RECORDED / name / "otel").glob("*.jsonl")
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    groups = [group for request in requests for group in request["resourceSpans"]]
    spans = [span for group in groups for scope in group["scopeSpans"] for span in scope["spans"]]
    return [
        Raw(
            span["name"],
            int(span["startTimeUnixNano"]),
            int(span["endTimeUnixNano"]),
            span["spanId"],
            span.get("parentSpanId", ""),
        )
        for span in spans
    ]


def opened_ns(name: str) -> int:
    manifest = json.loads((RECORDED / name / "step_000002" / "manifest.json").read_text())
    return int(manifest["processes"][0]["opened"]["wall_ns"])


def recorded(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED / name, tmp_path / "run")) / "step_000002"


def times(timeline: Timeline, spans: Sequence[Span]) -> list[tuple[int, int | None]]:
    """Return the start of each span after the opening, and its length."""
    return sorted((span.start_ns - timeline.window.start_ns, span.dur_ns) for span in spans)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_hangs_below_the_turn_that_ran_it(name: str, tmp_path: Path) -> None:
    timeline = load_step(recorded(name, tmp_path))
    agent, *below = foreign(timeline)
    assert agent.parent is not None
    assert timeline.spans[agent.parent].stage == "turn"
    assert {span.parent for span in below} == {timeline.spans.index(agent)}
    assert {(span.trajectory, span.turn) for span in (agent, *below)} == {("t0", 0)}


@pytest.mark.parametrize(
    ("name", "agent"), [("openinference", "solve"), ("pydantic_ai", "invoke_agent solver")]
)
def test_a_tool_and_the_calls_of_a_model_have_our_names(name: str, agent: str, tmp_path: Path) -> None:
    spans = foreign(load_step(recorded(name, tmp_path)))
    assert [(span.role, span.stage) for span in spans] == [
        ("agent_loop", agent),
        ("rollout", "generate"),
        ("env", "calculator"),
        ("rollout", "generate"),
    ]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("openinference", [(12, 5, 4), (12, 5, 4)]), ("pydantic_ai", [(52, 5, None), (54, 7, None)])],
)
def test_the_tokens_of_a_call_have_our_names(
    name: str, tokens: list[tuple[int, int, int | None]], tmp_path: Path
) -> None:
    calls = [
        span.attrs or {} for span in foreign(load_step(recorded(name, tmp_path))) if span.stage == "generate"
    ]
    names = ("prompt_tokens", "output_tokens", "cached_tokens")
    assert [tuple(attrs.get(name) for name in names) for attrs in calls] == tokens


@pytest.mark.parametrize("name", AGENTS)
def test_times_of_an_agent_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    timeline = load_step(recorded(name, tmp_path))
    raw = sorted((span.start_ns - opened_ns(name), span.end_ns - span.start_ns) for span in raw_spans(name))
    assert times(timeline, foreign(timeline)) == raw
    assert {timeline.processes[span.process].clock.alignment for span in foreign(timeline)} == {"same host"}


@pytest.mark.parametrize("name", AGENTS)
def test_no_prompt_no_answer_and_no_result_of_a_tool_is_kept(name: str, tmp_path: Path) -> None:
    (file,) = (RECORDED / name / "otel").glob("*.jsonl")
    content = file.read_text()
    assert all(f"SECRET {part}" in content for part in ("question", "answer"))
    assert "calculator" in content
    folder = recorded(name, tmp_path)
    spans = load_step(folder).spans
    assert b"SECRET" not in msgspec.json.encode([(span.stage, span.role, span.attrs) for span in spans])
    merge_step(folder)
    assert b"SECRET" not in gzip.decompress((folder / "timeline.json.gz").read_bytes())


# SGLang.


SERVERS = ("sglang", "sglang_tp")


def of_request(timeline: Timeline, trajectory: str) -> list[Span]:
    return [span for span in foreign(timeline) if span.trajectory == trajectory]


@pytest.mark.parametrize("name", SERVERS)
def test_a_request_of_sglang_has_the_phases_of_its_scheduler(name: str, tmp_path: Path) -> None:
    timeline = load_step(recorded(name, tmp_path))
    assert {span.role for span in foreign(timeline)} == {"rollout"}
    for trajectory in ("t0", "t1"):
        spans = of_request(timeline, trajectory)
        request, scheduler = (
            next(span for span in spans if span.stage == stage) for stage in ("request", "scheduler")
        )
        assert request.parent is not None
        turn = timeline.spans[request.parent]
        assert (turn.stage, turn.trajectory) == ("turn", trajectory)
        assert turn.start_ns <= request.start_ns <= timeline.until_ns(request) <= timeline.until_ns(turn)
        below = [span for span in spans if span.parent == timeline.spans.index(scheduler)]
        assert [span.stage for span in below] == ["request_process", "queue", "prefill", "wait", "decode"]
        assert [span.stage for span in below if span.waits] == ["queue", "wait"]


def test_times_of_sglang_are_those_of_the_file_without_single_tokens(tmp_path: Path) -> None:
    timeline = load_step(recorded("sglang", tmp_path))
    raw = raw_spans("sglang")
    assert sum(span.name == "decode_loop" for span in raw) == 3
    assert times(timeline, foreign(timeline)) == sorted(
        (span.start_ns - opened_ns("sglang"), span.end_ns - span.start_ns)
        for span in raw
        if span.name != "decode_loop"
    )


def overlap_ns(one: Sequence[Raw], other: Sequence[Raw]) -> int:
    """Return the time in which both run, of spans that do not overlap among themselves."""
    pairs = [(min(a.end_ns, b.end_ns), max(a.start_ns, b.start_ns)) for a in one for b in other]
    return sum(max(end_ns - start_ns, 0) for end_ns, start_ns in pairs)


def test_the_report_counts_requests_and_phases_of_sglang_once(tmp_path: Path) -> None:
    (engine,) = step_report(load_step(recorded("sglang", tmp_path))).engines
    assert (engine.requests, engine.prompt_tokens, engine.output_tokens) == (2, 16, 5)
    assert engine.running_most == 2
    raw = raw_spans("sglang")
    prefills = [span for span in raw if span.name == "prefill_forward"]
    first, second = (span for span in raw if span.name == "decode_forward")
    assert overlap_ns(prefills[:1], prefills[1:]) == overlap_ns(prefills, [first, second]) == 0
    assert engine.prefill_ns == sum(span.end_ns - span.start_ns for span in prefills)
    lengths = [span.end_ns - span.start_ns for span in (first, second)]
    assert engine.decode_ns == sum(lengths) - overlap_ns([first], [second])


def test_ranks_that_run_the_same_request_count_once(tmp_path: Path) -> None:
    raw = raw_spans("sglang_tp")
    schedulers = {span.span_id: span.name for span in raw if span.name.startswith("Scheduler")}
    assert len(schedulers) == 4
    first = [span for span in raw if "[TP 0]" in schedulers.get(span.parent_id, "")]
    timeline = load_step(recorded("sglang_tp", tmp_path))
    (engine,) = step_report(timeline).engines
    assert (engine.requests, engine.output_tokens, engine.running_most) == (2, 5, 2)
    prefills = [span for span in first if span.name == "prefill_forward"]
    assert overlap_ns(prefills[:1], prefills[1:]) == 0
    assert engine.prefill_ns == sum(span.end_ns - span.start_ns for span in prefills)
    assert [span.stage for span in foreign(timeline)].count("decode") == 2


def attributes(**values: object) -> list[object]:
    return [
        {"key": key, "value": {"stringValue" if isinstance(value, str) else "intValue": value}}
        for key, value in values.items()
    ]


def a_span(
    number: int, start_ms: int, end_ms: int, above: int | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
        "spanId": f"{number:016x}",
        "parentSpanId": "" if above is None else f"{above:016x}",
        "startTimeUnixNano": str(OPENED_NS + start_ms * MS),
        "endTimeUnixNano": str(OPENED_NS + end_ms * MS),
        **fields,
    }


def a_group(service: str, *spans: object, scope: str = "sglang server") -> dict[str, object]:
    resource = {"attributes": attributes(**{"service.name": service, "host.name": "host-a"})}
    return {"resource": resource, "scopeSpans": [{"scope": {"name": scope}, "spans": list(spans)}]}


def a_request(first: int, rid: str) -> list[dict[str, Any]]:
    """Return a request from 10 to 60 ms as SGLang names its spans."""
    latency = [{"key": "gen_ai.latency.e2e", "value": {"doubleValue": 0.05}}]
    labels = attributes(thread_label="Scheduler", tp_rank=0)
    return [
        a_span(first, 10, 60, name=f" Req {rid}", attributes=[*attributes(rid=rid), *latency]),
        a_span(first + 1, 11, 60, first, name="Scheduler [TP 0] (host:aaaaaaaa | pid:70)", attributes=labels),
        a_span(first + 2, 20, 60, first + 1, name="decode_forward"),
    ]


def a_step(tmp_path: Path, *groups: object, replica: int | None = None) -> Timeline:
    folder = StepFolder(tmp_path / "run")
    driver = folder.process("trainer", owner=True, host="host-a")
    driver.span("turn", 5 * MS, 90 * MS, trajectory="t0", turn=0)
    driver.close(100 * MS)
    if replica is not None:
        engine = folder.process("rollout", host="host-a", replica=replica)
        engine.span("prefill", 10 * MS, 20 * MS, role="rollout")
        engine.close(100 * MS)
    step = folder.write()
    (step / "otel").mkdir()
    (step / "otel" / "spans.jsonl").write_text(json.dumps({"resourceSpans": groups}) + "\n")
    return load_step(step)


def test_servers_of_two_names_on_one_host_are_two_engines(tmp_path: Path) -> None:
    groups = [a_group(f"server-{number}", *a_request(100 * number, f"r{number}")) for number in (1, 2)]
    timeline = a_step(tmp_path, *groups)
    assert len(timeline.processes) == 3
    assert [engine.running_most for engine in step_report(timeline).engines] == [1, 1]


@pytest.mark.parametrize("lost", [False, True])
def test_phases_that_sglang_lost_are_unknown_and_not_zero(lost: bool, tmp_path: Path) -> None:
    """Versions with several tokenizer workers send no span of their scheduler."""
    request, *scheduler = a_request(1, "r1")
    label = attributes(thread_label="MultiTokenizer-2760")
    front = [
        a_span(91, 10, 12, 1, name="MultiTokenizer-2760(host:aaaaaaaa | pid:2760)", attributes=label),
        a_span(92, 11, 12, 91, name="api_server_dispatch"),
    ]
    timeline = a_step(tmp_path, a_group("sglang", request, *front, *(() if lost else scheduler)))
    assert {span.stage for span in foreign(timeline)} >= {"request", "tokenizer", "api_server_dispatch"}
    report = step_report(timeline)
    assert [engine.decode_ns > 0 for engine in report.engines] == ([] if lost else [True])
    assert [row.lost for row in report.phaseless] == ([True] if lost else [])


def test_a_span_in_a_circle_of_sglang_ends_no_reading(tmp_path: Path) -> None:
    circle = [a_span(1, 10, 20, 2, name="prefill_forward"), a_span(2, 10, 20, 1, name="prefill_waiting")]
    timeline = a_step(tmp_path, a_group("sglang", *circle))
    assert sorted(span.stage for span in foreign(timeline)) == ["prefill", "queue"]


def a_call() -> dict[str, Any]:
    kind = {"openinference.span.kind": "LLM", "llm.token_count.prompt": 7, "llm.token_count.completion": 3}
    return a_span(900, 10, 60, name="ChatCompletion", attributes=attributes(**kind))


def engine_of(timeline: Timeline) -> Engine:
    return next(engine for engine in step_report(timeline).engines if engine.number == 0)


def test_tokens_of_calls_are_those_of_the_only_engine(tmp_path: Path) -> None:
    engine = engine_of(a_step(tmp_path, a_group("agent", a_call(), scope="agent"), replica=0))
    assert (engine.requests, engine.prompt_tokens, engine.output_tokens) == (1, 7, 3)


def test_tokens_of_calls_do_not_count_beside_requests_of_the_engine(tmp_path: Path) -> None:
    tokens = attributes(**{"gen_ai.usage.prompt_tokens": 7, "gen_ai.usage.completion_tokens": 3})
    request, *below = a_request(1, "r1")
    request["attributes"] += tokens
    groups = [a_group("agent", a_call(), scope="agent"), a_group("sglang", request, *below)]
    engines = step_report(a_step(tmp_path, *groups, replica=0)).engines
    assert sum(engine.requests or 0 for engine in engines) == 1
    assert sum(engine.output_tokens or 0 for engine in engines) == 3
