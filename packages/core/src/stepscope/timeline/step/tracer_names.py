"""Names of stepscope for spans of agents' tracers: OpenInference's, and those of the `gen_ai` conventions.

The tables hold what the recordings in `tests/recorded_otel` have. Any other span keeps its name, and has its
process' role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.files.values import AttrValue, bounded
from stepscope.timeline.readers.otlp import OtlpSpan
from stepscope.timeline.step.engine_requests import engine_stage, with_our_names

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


class Naming(NamedTuple):
    """The role, the stage and the attributes of a span in a step's timeline."""

    role: str | None
    """None: that of its process."""
    stage: str
    attrs: dict[str, AttrValue]


def naming(span: OtlpSpan, *, alone: bool) -> Naming:
    """Return what stepscope calls a span.

    Args:
        alone: No engine's own request is known, so that tokens are counted where an agent asks for them.
    """
    stage = engine_stage(span)
    if stage is not None:
        return Naming(None, stage, with_our_names(span.attrs))
    kind = _kind(span.attrs)
    if kind == _GENERATE:
        return Naming(_ROLES[kind], kind, with_our_names(span.attrs) if alone else span.attrs)
    stage = _tool(span.attrs) if kind == _TOOL else None
    return Naming(_ROLES.get(kind or ""), stage or span.name, span.attrs)


def _kind(attrs: Mapping[str, AttrValue]) -> str | None:
    kinds = (table.get(str(attrs.get(name))) for name, table in _KINDS.items())
    return next(filter(None, kinds), None)


def _tool(attrs: Mapping[str, AttrValue]) -> str | None:
    names = (attrs.get(name) for name in _TOOL_NAMES)
    return next((bounded(name) for name in names if isinstance(name, str) and name), None)
