"""Spans of other tracers under the names of stepscope.

Of inference engines, these are vLLM's `llm_request`, and SGLang's `Req` with those below it. Of agents'
tracers, those of OpenInference and of the `gen_ai` conventions. The tables hold what the recordings in
`tests/recorded_otel` have. Any other span keeps its name, and has its process' role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.files.spans import WAITING
from stepscope.files.trace_context import TraceContext
from stepscope.files.values import AttrValue, bounded
from stepscope_report.timeline.model import Span
from stepscope_report.timeline.readers.otlp import OtlpSpan

_LATENCY = "gen_ai.latency."
_PHASES = (
    ("queue", f"{_LATENCY}time_in_queue"),
    ("prefill", f"{_LATENCY}time_in_model_prefill"),
    ("decode", f"{_LATENCY}time_in_model_decode"),
)
"""The phases of a vLLM request, in their order. SGLang's values would count the queue as prefill; its own
spans are read instead."""
_SGLANG = "sglang server"
"""The tracer of SGLang's spans."""
_SGLANG_STAGES = {
    "prefill_waiting": "queue",
    "prefill_forward": "prefill",
    "chunked_prefill": "prefill",
    "decode_waiting": "wait",
    "decode_forward": "decode",
    "decode_loop": "decode",
}
_RANKS = ("tp_rank", "pp_rank")
"""Attributes of the span of a scheduler. Its ranks run the same passes for a request."""
_DEEPEST = 5
"""Spans in one line, from the request to a token, and one to spare."""
_THREAD = "thread_label"
"""The attribute of the spans of SGLang's processes, whose names hold a host and a pid."""
_FACTS = {
    "gen_ai.request.id": "request_id",
    "rid": "request_id",
    "gen_ai.usage.prompt_tokens": "prompt_tokens",
    "gen_ai.usage.completion_tokens": "output_tokens",
    "gen_ai.usage.cached_tokens": "cached_tokens",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "output_tokens",
    "llm.token_count.prompt": "prompt_tokens",
    "llm.token_count.completion": "output_tokens",
    "llm.token_count.prompt_details.cache_read": "cached_tokens",
}
"""Attributes, and their names in stepscope (`record_request`)."""
_GENERATE, _TOOL, _AGENT = "generate", "tool", "agent"
_KINDS = {
    "openinference.span.kind": {"LLM": _GENERATE, "TOOL": _TOOL, "AGENT": _AGENT},
    "gen_ai.operation.name": {
        "chat": _GENERATE,
        "generate_content": _GENERATE,
        "text_completion": _GENERATE,
        "execute_tool": _TOOL,
        "invoke_agent": _AGENT,
    },
}
"""Attribute -> its value -> the kind of work."""
_ROLES = {_GENERATE: "rollout", _TOOL: "env", _AGENT: "agent_loop"}
_TOOL_NAMES = ("gen_ai.tool.name", "tool.name")


def is_request(span: OtlpSpan) -> bool:
    """Return whether an inference engine made the span for one request."""
    return any(name.startswith(_LATENCY) for name in span.attrs)


def is_of_engine(span: OtlpSpan) -> bool:
    return span.scope == _SGLANG or is_request(span)


def _engine_stage(span: OtlpSpan) -> str | None:
    """Return the stage of a span that an engine made; None for any other."""
    if is_request(span):
        return "request"
    if span.scope != _SGLANG:
        return None
    thread = span.attrs.get(_THREAD)
    return thread.lower() if isinstance(thread, str) else _SGLANG_STAGES.get(span.name, span.name)


def without_copies(spans: Sequence[OtlpSpan]) -> list[OtlpSpan]:
    """Return the spans without those of SGLang that repeat the time of another one.

    These are single tokens and chunks below their phase, and all ranks of an engine but the first.
    """
    of_sglang = {TraceContext(span.trace_id, span.span_id): span for span in spans if span.scope == _SGLANG}

    def above(span: OtlpSpan) -> OtlpSpan | None:
        return of_sglang.get(TraceContext(span.trace_id, span.parent_id or ""))

    def is_copy(span: OtlpSpan) -> bool:
        stage, around = _SGLANG_STAGES.get(span.name), above(span)
        if stage is not None and around is not None and _SGLANG_STAGES.get(around.name) == stage:
            return True
        path: OtlpSpan | None = span
        for _ in range(_DEEPEST):
            if path is None:
                return False
            if any(path.attrs.get(rank) for rank in _RANKS):
                return True
            path = above(path)
        return False

    return [span for span in spans if span.scope != _SGLANG or not is_copy(span)]


def _with_our_names(attrs: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    """Return the attributes of a request, with the names of stepscope where there are any."""
    named: dict[str, AttrValue] = {}
    for name, value in attrs.items():
        if name in _FACTS:
            named.setdefault(_FACTS[name], value)
        else:
            named[name] = value
    return named


def phases(request: Span) -> Iterator[Span]:
    """Yield the phases of an engine's request, if the engine states the length of all of them.

    It states no times. The phases are placed without gaps, and the last one ends with the last token: before
    them the frontend read the prompt.
    """
    if request.end_ns is None or request.dur_ns is None:
        return
    seconds = [(request.attrs or {}).get(name) for _, name in _PHASES]
    lengths = [round(s * 1e9) for s in seconds if isinstance(s, int | float) and 0 <= s < 1e6]
    until_ns = _until_ns(request.attrs or {}, request.dur_ns)
    if len(lengths) < len(_PHASES) or sum(lengths) > until_ns:
        return
    at_ns = request.start_ns + until_ns - sum(lengths)
    for (stage, _), length_ns in zip(_PHASES, lengths, strict=True):
        yield msgspec.structs.replace(
            request,
            stage=stage,
            start_ns=at_ns,
            end_ns=at_ns + length_ns,
            dur_ns=length_ns,
            attrs=None,
            error=None,
            waits=stage in WAITING,
        )
        at_ns += length_ns


def _until_ns(attrs: Mapping[str, AttrValue], dur_ns: int) -> int:
    """Return the time from the arrival to the last token, or to the end of the span if it is not stated."""
    seconds = attrs.get(f"{_LATENCY}e2e")
    return min(round(seconds * 1e9), dur_ns) if isinstance(seconds, float) and 0 < seconds < 1e6 else dur_ns


class Naming(NamedTuple):
    """The role, the stage and the attributes of a span in a step's timeline."""

    role: str | None
    """The role; None for the role of the process."""
    stage: str
    attrs: dict[str, AttrValue]


def naming(span: OtlpSpan, *, alone: bool) -> Naming:
    """Return what stepscope calls a span.

    Args:
        alone: No engine's own request is known, so that tokens are counted where an agent asks for them.
    """
    stage = _engine_stage(span)
    if stage is not None:
        return Naming(None, stage, _with_our_names(span.attrs))
    kind = _kind(span.attrs)
    if kind == _GENERATE:
        return Naming(_ROLES[kind], kind, _with_our_names(span.attrs) if alone else span.attrs)
    stage = _tool(span.attrs) if kind == _TOOL else None
    return Naming(_ROLES.get(kind or ""), stage or span.name, span.attrs)


def _kind(attrs: Mapping[str, AttrValue]) -> str | None:
    kinds = (table.get(str(attrs.get(name))) for name, table in _KINDS.items())
    return next(filter(None, kinds), None)


def _tool(attrs: Mapping[str, AttrValue]) -> str | None:
    names = (attrs.get(name) for name in _TOOL_NAMES)
    return next((bounded(name) for name in names if isinstance(name, str) and name), None)
