"""Requests to inference engines in OpenTelemetry: the spans `llm_request` of vLLM and `Req` of SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from stepscope.files.spans import WAITING
from stepscope.files.values import AttrValue
from stepscope.timeline.model import Span
from stepscope.timeline.readers.otlp import OtlpSpan

_LATENCY = "gen_ai.latency."
_PHASES = (
    ("queue", f"{_LATENCY}time_in_queue"),
    ("prefill", f"{_LATENCY}time_in_model_prefill"),
    ("decode", f"{_LATENCY}time_in_model_decode"),
)
"""In their order. SGLang counts the time in the queue as prefill, so its requests get no phases."""
_FACTS = {
    "gen_ai.request.id": "request_id",
    "rid": "request_id",
    "gen_ai.usage.prompt_tokens": "prompt_tokens",
    "gen_ai.usage.completion_tokens": "output_tokens",
    "gen_ai.usage.cached_tokens": "cached_tokens",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "output_tokens",
}
"""Attributes, and their names in stepscope (`record_request`)."""


def is_request(span: OtlpSpan) -> bool:
    """Return whether an inference engine made the span for one request."""
    return any(name.startswith(_LATENCY) for name in span.attrs)


def engine_request(span: OtlpSpan) -> tuple[str, dict[str, AttrValue]]:
    """Return the stage and the attributes of an engine's request."""
    attrs: dict[str, AttrValue] = {}
    for name, value in span.attrs.items():
        if name in _FACTS:
            attrs.setdefault(_FACTS[name], value)
        else:
            attrs[name] = value
    return "request", attrs


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
