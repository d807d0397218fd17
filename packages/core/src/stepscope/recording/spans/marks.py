"""Marks: spans without length, by which a loop tells facts of its step."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.files.spans import CONSUME, STEP_TOKENS
from stepscope.files.values import AttrValue
from stepscope.recording.spans.span import SpanSink, mark


def mark_consumed(log: SpanSink, trajectory: str, begun: int | None, policy_version: int | None) -> None:
    """Record that the step consumes a trajectory."""
    attrs = {"begun": begun, "begun_version": policy_version}
    known: dict[str, AttrValue] = {name: value for name, value in attrs.items() if value is not None}
    mark(log, CONSUME, known, trajectory=trajectory)


def mark_tokens(log: SpanSink, counts: Mapping[str, int]) -> None:
    """Record tokens of the step: {`rollout` or `train`: number}."""
    mark(log, STEP_TOKENS, dict(counts))
