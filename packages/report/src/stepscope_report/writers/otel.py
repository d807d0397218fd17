"""OpenTelemetry: a step as one trace of its spans, sent by OTLP over HTTP.

The OTEL_EXPORTER_OTLP_* variables set the address and the headers. Ids are computed from run, step and span,
so that sending a step again gives the same trace.

Attribute names that begin with `gen_ai.` are those of the semantic conventions for generative AI, whose
status is Development (https://opentelemetry.io/docs/specs/semconv/gen-ai/). Names that begin with `rl.` are
proposed (https://github.com/open-telemetry/semantic-conventions-genai/issues/88). Other names begin with
`stepscope.` or are the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from stepscope.files.trace_context import SpanIds, parse_traceparent, trace_id_of
from stepscope_report.timeline import Process, Span, Timeline
from stepscope_report.writers import ReportedStep

MOST_SPANS = 10_000
"""Largest number of spans that are sent for a step. If a step has more, the shortest spans are left out, and
an attribute of the root span has their number."""
BATCH = 500
Value: TypeAlias = str | int | float | bool | Sequence[str]
RUN_ID = "rl.run.id"
ITERATION = "rl.loop.iteration"
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
"""OpenTelemetry's names for the attributes that `record_request` sets."""
_TOKENS = ("prompt_tokens", "output_tokens")


def on_report(step: ReportedStep) -> None:
    send(step, OTLPSpanExporter())


def send(step: ReportedStep, exporter: SpanExporter) -> None:
    """Send the spans to the collector.

    Raises:
        OSError: the collector did not accept all spans.
    """
    spans = list(_spans_of(step))
    try:
        if not spans:
            raise OSError("OpenTelemetry made no spans. Fix: unset OTEL_SDK_DISABLED")
        for start in range(0, len(spans), BATCH):
            if exporter.export(spans[start : start + BATCH]) is not SpanExportResult.SUCCESS:
                raise OSError(f"the collector did not take the spans ({start} of {len(spans)} are there)")
    finally:
        exporter.shutdown()


def _spans_of(step: ReportedStep) -> Iterator[ReadableSpan]:
    """Yield the root span with the step's figures as attributes, then the longest spans of processes with an
    aligned clock.

    Spans that another tracer recorded are left out, because that tracer has sent them.
    """
    timeline, ended, ids = step.timeline, _Ended(), _Ids(step.timeline)
    service = os.environ.get("OTEL_SERVICE_NAME") or "stepscope"
    resource = Resource.create({"service.name": service, RUN_ID: timeline.run_id})
    # No samplers or limits from the environment, which are for services: every span here is wanted.
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=resource,
        shutdown_on_exit=False,
        id_generator=ids,
        span_limits=SpanLimits(max_attributes=SpanLimits.UNSET, max_span_attributes=SpanLimits.UNSET),
    )
    provider.add_span_processor(ended)
    tracer = provider.get_tracer("stepscope")
    aligned = [
        (at, span)
        for at, span in enumerate(timeline.spans)
        if timeline.processes[span.process].aligned and span.number
    ]
    chosen = sorted(aligned, key=lambda pair: -(pair[1].dur_ns or timeline.window.wall_ns))[:MOST_SPANS]
    ids.next_span = ids.root
    root = tracer.start_span(f"step {timeline.step}", start_time=timeline.window.start_ns)
    root.set_attributes(
        {
            ITERATION: timeline.step,
            "stepscope.spans_left_out": sum(1 for span in timeline.spans if span.number) - len(chosen),
            **{f"stepscope.{name}": value for name, value in step.scalars.items()},
        }
    )
    root.end(timeline.window.end_ns)
    kept = {at for at, _ in chosen}
    for _, span in sorted(chosen):
        ids.next_span = ids.of(span)
        above = None if span.parent is None or span.parent not in kept else timeline.spans[span.parent]
        _record(tracer, timeline, span, ids.parent(span, above))
    yield from ended.spans


def _record(tracer: Tracer, timeline: Timeline, span: Span, above: SpanContext) -> None:
    attributes = _attributes(span, timeline.processes[span.process])
    made = tracer.start_span(
        span.stage,
        context=set_span_in_context(NonRecordingSpan(above)),
        attributes=attributes,
        start_time=span.start_ns,
    )
    if span.error is not None:
        made.set_status(Status(StatusCode.ERROR, span.error))
    elif span.cancelled:
        made.set_attribute("stepscope.cancelled", True)
    elif span.end_ns is None:
        made.set_attribute("stepscope.never_ended", True)
    made.end(timeline.until_ns(span))


class _Ids(IdGenerator):  # type: ignore[misc]  # it is Any where opentelemetry is not installed
    """Generator of span ids. They are the same as in carriers (`files.trace_context`)."""

    def __init__(self, timeline: Timeline) -> None:
        run, step = timeline.run_id, timeline.step
        self._trace = int(trace_id_of(run, step), 16)
        self._processes = [SpanIds(run, step, process.info.key) for process in timeline.processes]
        self.root = int(SpanIds(run, step, "").span_id(0), 16)
        self.next_span = self.root
        """Id of the span that is started next."""

    def of(self, span: Span) -> int:
        return int(self._processes[span.process].span_id(span.number), 16)

    def context(self, span_id: int) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(self.generate_trace_id(), span_id, is_remote=False, trace_flags=sampled)

    def parent(self, span: Span, above: Span | None) -> SpanContext:
        """Return the context of a span's parent: a span that is sent, a span of another tracer in this trace,
        or the root.
        """
        foreign = parse_traceparent(span.traceparent)
        if above is not None:
            return self.context(self.of(above))
        if foreign is not None and int(foreign.trace_id, 16) == self._trace:
            return self.context(int(foreign.span_id, 16))
        return self.context(self.root)

    def generate_span_id(self) -> int:
        return self.next_span

    def generate_trace_id(self) -> int:
        return self._trace


class _Ended(SpanProcessor):  # type: ignore[misc]  # likewise
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _attributes(span: Span, process: Process) -> dict[str, Value]:
    """Return the attributes of a span under their names in OpenTelemetry."""
    values: dict[str, Value | None] = {
        "stepscope.role": span.role,
        "stepscope.process": process.name,
        "stepscope.rank": process.info.rank,
        "host.name": process.info.host,
        "process.pid": process.info.pid,
        ITERATION: span.step,
        "stepscope.policy_version": span.policy_version,
        "gen_ai.conversation.id": span.trajectory,
        "stepscope.turn": span.turn,
        "gen_ai.operation.name": _operation(span),
        **_own(span),
    }
    return {name: value for name, value in values.items() if value is not None}


def _operation(span: Span) -> str | None:
    """Return the operation of a span: a rollout, a tool, or a model call (a span with tokens). None for other
    spans.
    """
    attrs = span.attrs or {}
    if span.stage == "trajectory":
        return "invoke_agent"
    if _is_tool(span):
        return "execute_tool"
    return "chat" if any(name in attrs for name in _TOKENS) else None


def _is_tool(span: Span) -> bool:
    return span.role == "env" or span.stage.startswith("tool")


def _own(span: Span) -> Mapping[str, Value | None]:
    """Return the span's own attributes, with the name of the tool that it ran."""
    attrs: dict[str, Value | None] = {
        _FACTS.get(name, name): value for name, value in (span.attrs or {}).items()
    }
    reason = attrs.pop("finish_reason", None)
    if isinstance(reason, str):
        attrs["gen_ai.response.finish_reasons"] = reason.split(",")
    if _is_tool(span):
        attrs.setdefault("gen_ai.tool.name", attrs.pop("name", None) or span.stage)
    if span.stage == "sync_weights" and "bytes" in attrs:
        attrs["rl.sync.bytes"] = attrs.pop("bytes")
    return attrs
