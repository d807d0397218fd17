"""Times of one vLLM request, as attributes and spans for the turn that made it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Protocol

from stepscope_vllm._driving.target import Fact

_PHASES = ("queue", "prefill", "decode")

_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""Fields of `RequestStateStats`, in seconds of the engine core's monotonic clock; 0 if not reached."""

_SLACK_S = 0.05
"""Largest correction of the wall clock that is tolerated between a request's arrival and its end."""


class TimedSpan(Protocol):
    """The methods of the results of `span`, `turn` and `trajectory` that `record_request` calls."""

    def set(self, **attrs: Fact) -> None: ...

    def add(self, stage: str, start_ns: int, end_ns: int, *, role: str | None = None) -> None: ...


def record_request(span: TimedSpan, output: object) -> None:
    """Record on the span around a request how the engine spent the request's time.

    The span gets `request_facts` as attributes, and the child spans `queue`, `prefill` and `decode` of role
    `rollout`, with the engine's times.

    Args:
        span: The open turn or span that made the request and waited for its result.
        output: vLLM's finished `RequestOutput`. Without `metrics`, or if the engine core runs on another
            host, whose clock differs, the span gets attributes and no child spans.
    """
    span.set(**request_facts(output))
    stamps = _stamps_here(getattr(output, "metrics", None))
    for stage, (began, ended) in zip(_PHASES, pairwise(stamps), strict=False):
        span.add(stage, round(began * 1e9), round(ended * 1e9), role="rollout")


def _stamps_here(stats: Any) -> list[float]:
    """Return the times of a finished request on this process' monotonic clock; empty if another clock
    measured them.
    """
    stamps = [float(getattr(stats, name, 0.0)) for name in _STAMPS]
    arrived = float(getattr(stats, "arrival_time", 0.0))  # the only time from the wall clock of this process
    now = time.monotonic()
    earliest, latest = now - (time.time() - arrived) - _SLACK_S, now + _SLACK_S
    fits = all(a <= b for a, b in pairwise([earliest, *stamps, latest]))
    return stamps if arrived and fits else []


def request_facts(output: object) -> dict[str, str | int | float]:
    """Return how one request spent its time, as attributes: `span.set(**request_facts(output))`.

    Args:
        output: vLLM's finished `RequestOutput`. It has `metrics` unless the engine was built with
            `disable_log_stats=True`, the default of `LLM`. Without `metrics` the result has no times.

    Returns:
        `request_id`, `prompt_tokens`, `cached_tokens`, `output_tokens`, `finish_reason`; with metrics also
        `queued_s`, `prefill_s`, `decode_s`, `first_token_s`, `preemptions`.
    """
    facts: dict[str, str | int | float] = {"request_id": str(getattr(output, "request_id", ""))}
    outputs = getattr(output, "outputs", None) or ()
    facts["prompt_tokens"] = len(getattr(output, "prompt_token_ids", None) or ())
    facts["output_tokens"] = sum(len(completion.token_ids) for completion in outputs)
    cached = getattr(output, "num_cached_tokens", None)
    if cached is not None:
        facts["cached_tokens"] = int(cached)
    reasons = {str(completion.finish_reason) for completion in outputs if completion.finish_reason}
    if reasons:
        facts["finish_reason"] = ",".join(sorted(reasons))
    facts.update(_times(getattr(output, "metrics", None)))
    return facts


def _times(stats: Any) -> dict[str, int | float]:
    stamps = [getattr(stats, name, 0.0) for name in _STAMPS]
    times: dict[str, int | float] = {}
    for name, (began, ended) in zip(("queued_s", "prefill_s", "decode_s"), pairwise(stamps), strict=False):
        if began and ended:
            times[name] = round(ended - began, 6)
    if getattr(stats, "first_token_latency", 0.0):
        times["first_token_s"] = round(stats.first_token_latency, 6)
    if hasattr(stats, "num_preemptions"):
        times["preemptions"] = int(stats.num_preemptions)
    return times
