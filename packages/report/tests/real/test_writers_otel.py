"""The real OpenTelemetry SDK: a step's spans in it, and its context in carriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from socket import gethostname

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry import trace
from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from packages.report.tests.steps import some
from stepscope import ProfileConfig, attach, capture, carrier, span, trajectory, turn
from stepscope._recording.process import exports
from stepscope.files.layout import RunLayout
from stepscope.files.spans import Open
from stepscope.files.trace_context import parse_traceparent
from stepscope_report import step_report, to_scalars
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.timeline.sources import read_spans
from stepscope_report.writers import ReportedStep
from stepscope_report.writers.otel import send

PROPAGATOR = TraceContextTextMapPropagator()


class Kept(SpanExporter):  # type: ignore[misc]  # not installed where mypy runs
    """The spans that were exported, by name."""

    def __init__(self) -> None:
        self.spans: dict[str, ReadableSpan] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans |= {span.name: span for span in spans}
        return SpanExportResult.SUCCESS


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(tmp_path), steps="every:1", roles={"*": {"profiler": "off"}})


@pytest.fixture
def tracer() -> Iterator[trace.Tracer]:
    """Provide the tracer of a program that knows nothing of stepscope."""
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("a tool's service")
    provider.shutdown()


def a_reported_step(config: ProfileConfig) -> tuple[ReportedStep, Timeline]:
    assert not exports.exporter().drain(60)
    run = RunLayout(config.save_path)
    timeline = load_step(run.step(2).root)
    report = step_report(timeline)
    return ReportedStep(run=run, report=report, timeline=timeline, scalars=to_scalars(report)), timeline


def exported(config: ProfileConfig) -> dict[str, ReadableSpan]:
    kept = Kept()
    send(a_reported_step(config)[0], kept)
    return kept.spans


def records(config: ProfileConfig) -> dict[str, Open]:
    (file,) = RunLayout(config.save_path).step(2).spans.glob("*.jsonl")
    return {record.stage: record for record in read_spans(file).spans.values()}


def test_a_step_is_one_trace_with_its_spans_where_they_were(config: ProfileConfig) -> None:
    with capture(2, config=config), trajectory("t0"), span("rollout"), span("update_actor"):
        pass
    step, timeline = a_reported_step(config)
    sent: list[dict[str, tuple[object, ...]]] = []
    for _ in range(2):
        exporter = Kept()
        send(step, exporter)
        spans = exporter.spans
        assert list(spans) == ["step 2", "trajectory", "rollout", "update_actor"]
        root, begun, rollout, update = spans.values()
        assert (root.start_time, root.end_time) == (timeline.window.start_ns, timeline.window.end_ns)
        assert root.attributes["stepscope.step/wall_seconds"] == step.scalars["step/wall_seconds"]
        assert root.attributes["stepscope.spans_left_out"] == 0
        assert root.parent is None
        assert begun.parent.span_id == root.context.span_id
        assert rollout.parent.span_id == begun.context.span_id
        assert update.parent.span_id == rollout.context.span_id
        assert update.attributes["gen_ai.conversation.id"] == "t0"
        assert begun.attributes["gen_ai.operation.name"] == "invoke_agent"
        assert (root.attributes["rl.loop.iteration"], root.resource.attributes["rl.run.id"]) == (
            2,
            timeline.run_id,
        )
        assert {recorded.context.trace_id for recorded in spans.values()} == {root.context.trace_id}
        for recorded, was in zip((begun, rollout, update), timeline.spans, strict=True):
            assert (recorded.start_time, recorded.end_time) == (was.start_ns, was.end_ns)
        sent.append({name: (recorded.context, recorded.start_time) for name, recorded in spans.items()})
    assert sent[0] == sent[1]  # sent again, it is the same trace


def test_a_span_that_the_sdk_starts_from_a_carrier_hangs_below_ours(
    config: ProfileConfig, tracer: trace.Tracer
) -> None:
    with capture(2, config=config), trajectory("t0"), turn(1):
        carried = carrier()
        tool = tracer.start_span("tool", context=PROPAGATOR.extract(carried))
    ours = exported(config)["turn"].context
    assert (tool.context.trace_id, tool.parent.span_id) == (ours.trace_id, ours.span_id)
    assert tool.parent.is_remote
    assert tool.context.trace_flags.sampled


def test_a_span_below_attached_headers_names_the_span_of_the_sdk(
    config: ProfileConfig, tracer: trace.Tracer
) -> None:
    headers: dict[str, str] = {}
    with tracer.start_as_current_span("request") as request:
        PROPAGATOR.inject(headers)
    with capture(2, config=config), attach(headers), span("environment"):
        pass
    context = some(parse_traceparent(records(config)["environment"].traceparent))
    assert context.span_id == trace.format_span_id(request.get_span_context().span_id)
    assert context.trace_id == trace.format_trace_id(request.get_span_context().trace_id)


def test_headers_that_the_sdk_passes_on_lead_back_to_our_span(config: ProfileConfig) -> None:
    headers: dict[str, str] = {}
    with capture(2, config=config):
        with span("turn"):
            PROPAGATOR.inject(headers, PROPAGATOR.extract(carrier()))
        with attach(headers), span("environment"):
            pass
    _, timeline = a_reported_step(config)
    by_stage = {line.stage: at for at, line in enumerate(timeline.spans)}
    assert timeline.spans[by_stage["environment"]].parent == by_stage["turn"]


def by_json_file(folder: Path) -> SpanExporter:
    return FileSpanExporter(folder / "tool.jsonl")


class ByProtobuf(SpanExporter):  # type: ignore[misc]  # not installed where mypy runs
    """The exporter's protobuf, as protobuf's own JSON: a document over many lines, ids in base64."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        (self._folder / "tool.json").write_text(MessageToJson(encode_spans(spans)))
        return SpanExportResult.SUCCESS


def a_tools_step(config: ProfileConfig, exporter: Callable[[Path], SpanExporter]) -> Timeline:
    """Return a step whose turn called a tool, of which the SDK wrote a span."""
    folder = RunLayout(config.save_path).otel
    folder.mkdir(parents=True)
    provider = TracerProvider(
        resource=Resource.create({"service.name": "calculator", "host.name": gethostname()}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter(folder)))
    tracer = provider.get_tracer("a tool's service")
    with capture(2, config=config), trajectory("t0"), turn(1):
        with tracer.start_as_current_span("execute_tool add", context=PROPAGATOR.extract(carrier())) as tool:
            tool.set_attributes({"gen_ai.tool.name": "add", "gen_ai.tool.call.arguments": "a secret"})
    provider.shutdown()
    return a_reported_step(config)[1]


def test_spans_in_protobufs_own_json_are_named_as_left_out(config: ProfileConfig) -> None:
    """OTLP's JSON has hexadecimal ids, protobuf's has base64."""
    timeline = a_tools_step(config, ByProtobuf)
    assert {span.stage for span in timeline.spans} == {"trajectory", "turn"}
    assert any("not 32 hexadecimal digits" in problem.what for problem in timeline.problems)


def test_spans_that_the_sdk_writes_to_a_file_hang_below_our_turn(config: ProfileConfig) -> None:
    timeline = a_tools_step(config, by_json_file)
    (tool,) = (span for span in timeline.spans if span.stage == "execute_tool add")
    assert timeline.problems == ()
    assert tool.parent is not None
    assert timeline.spans[tool.parent].stage == "turn"
    assert (tool.role, tool.trajectory, tool.turn) == ("calculator", "t0", 1)
    assert tool.attrs == {"gen_ai.tool.name": "add"}
    assert timeline.processes[tool.process].clock.alignment == "same host"
    assert "execute_tool add" not in exported(config)


def test_a_span_of_ours_is_sent_below_the_tools_span_that_called_it(
    config: ProfileConfig, tracer: trace.Tracer
) -> None:
    headers: dict[str, str] = {}
    with capture(2, config=config):
        with trajectory("t0"), turn(1):
            tool = tracer.start_span("tool", context=PROPAGATOR.extract(carrier()))
            PROPAGATOR.inject(headers, trace.set_span_in_context(tool))
        with attach(headers), span("environment"):
            pass
    sent = exported(config)
    assert sent["environment"].parent.span_id == tool.get_span_context().span_id
    assert sent["environment"].context.trace_id == tool.get_span_context().trace_id


def test_the_names_are_those_of_the_conventions(config: ProfileConfig) -> None:
    with capture(2, config=config), trajectory("t0"):
        with turn(0) as model:
            model.set(prompt_tokens=3, output_tokens=7, cached_tokens=1, finish_reason="stop")
        with span("tool", role="env", attrs={"name": "calculator"}):
            pass
    sent = exported(config)
    chat, tool = sent["turn"].attributes, sent["tool"].attributes
    assert chat[gen_ai.GEN_AI_OPERATION_NAME] == gen_ai.GenAiOperationNameValues.CHAT.value
    assert chat[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == 3
    assert chat[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == 7
    assert chat[gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 1
    assert chat[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == ("stop",)
    assert chat[gen_ai.GEN_AI_CONVERSATION_ID] == tool[gen_ai.GEN_AI_CONVERSATION_ID] == "t0"
    assert tool[gen_ai.GEN_AI_OPERATION_NAME] == gen_ai.GenAiOperationNameValues.EXECUTE_TOOL.value
    assert tool[gen_ai.GEN_AI_TOOL_NAME] == "calculator"
