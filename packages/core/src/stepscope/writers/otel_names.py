"""Names of a span's attributes in OpenTelemetry.

`gen_ai.*` are the semantic conventions for generative AI, of status Development
(https://opentelemetry.io/docs/specs/semconv/gen-ai/). `rl.*` are proposed
(https://github.com/open-telemetry/semantic-conventions-genai/issues/88). Others begin with `stepscope.`, or
are the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from stepscope.timeline import Process, Span

Value: TypeAlias = str | int | float | bool | Sequence[str]
RUN_ID = "rl.run.id"
ITERATION = "rl.loop.iteration"
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
"""Attributes that `record_request` sets."""
_TOKENS = ("prompt_tokens", "output_tokens")


def attributes_of(span: Span, process: Process) -> dict[str, Value]:
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
    """Return the operation: a rollout, a tool, or a call of the model, which states its tokens."""
    attrs = span.attrs or {}
    if span.stage == "trajectory":
        return "invoke_agent"
    if _is_tool(span):
        return "execute_tool"
    return "chat" if any(name in attrs for name in _TOKENS) else None


def _is_tool(span: Span) -> bool:
    return span.role == "env" or span.stage.startswith("tool")


def _own(span: Span) -> Mapping[str, Value | None]:
    """Return the span's own attributes, and the name of the tool that it ran."""
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
