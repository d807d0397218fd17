"""Times of one SGLang request, as attributes for the span of the turn that made it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeAlias

log = logging.getLogger("stepscope")
Fact: TypeAlias = str | int | float

_PHASES = ("queue", "prefill", "decode")
_SLACK_S = 0.05
"""Largest correction of the wall clock that is tolerated between a request's arrival and its end."""

_COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "output_tokens",
    "num_retractions": "preemptions",
}
"""{SGLang's name: stepscope's name, which is the same for all engines}."""


class TimedSpan(Protocol):
    """The methods of the results of `span`, `turn` and `trajectory` that `record_request` calls."""

    def set(self, **attrs: Fact) -> None: ...

    def add(self, stage: str, start_ns: int, end_ns: int, *, role: str | None = None) -> None: ...


def record_request(span: TimedSpan, answer: Mapping[str, object]) -> None:
    """Record on the span around a request how the engine spent the request's time.

    The span gets `request_facts` as attributes, and the child spans `queue`, `prefill` and `decode` of role
    `rollout`, with the engine's times.

    Args:
        span: The open turn or span that made the request and waited for its result.
        answer: As for `request_facts`. If the engine runs without `enable_metrics`, or on a host with another
            wall clock, the span gets attributes and no child spans.
    """
    span.set(**request_facts(answer))
    stamps = _stamps_here(_meta_info(answer))
    for stage, (began, ended) in zip(_PHASES, pairwise(stamps), strict=False):
        span.add(stage, began, ended, role="rollout")


def request_facts(answer: Mapping[str, object]) -> dict[str, Fact]:
    """Return how one request spent its time, as attributes: `turn.set(**request_facts(answer))`.

    Args:
        answer: The answer of `generate`, `async_generate` or POST /generate to one prompt, or its
            `meta_info`.

    Returns:
        `request_id`, `prompt_tokens`, `cached_tokens`, `output_tokens`, `finish_reason`, `weight_version`,
        `preemptions`, `latency_s`; from an engine with `enable_metrics` also `queued_s`, `prefill_s`,
        `decode_s` and `first_token_s`. Facts that the answer does not have are absent.
    """
    info = _meta_info(answer)
    facts: dict[str, Fact] = {}
    for name, ours in (("id", "request_id"), ("weight_version", "weight_version")):
        if isinstance(info.get(name), str):
            facts[ours] = str(info[name])
    for name, ours in _COUNTS.items():
        value = info.get(name)
        if isinstance(value, int):
            facts[ours] = value
    reason = info.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type"):
        facts["finish_reason"] = str(reason["type"])
    return {**facts, **_times(info)}


def _meta_info(answer: object) -> Mapping[str, object]:
    if not isinstance(answer, Mapping):
        _warn_once(type(answer).__name__)
        return {}
    inner = answer.get("meta_info", answer)
    return inner if isinstance(inner, Mapping) else {}


@cache
def _warn_once(kind: str) -> None:
    log.warning(
        "stepscope: nothing is recorded of SGLang's answer to several prompts or samples (a %s). Fix: give "
        "each answer in it to the span of its own turn",
        kind,
    )


def _stamps_here(info: Mapping[str, object]) -> list[int]:
    """Return the times at which a request was queued, began, had its first token, and ended.

    The times are in ns of this host's monotonic clock. Empty if a time is missing, or does not fit this
    host's wall clock.
    """
    names = ("request_received_ts", "forward_entry_time", "prefill_finished_time", "request_finished_ts")
    received, *stamps = (_number(info, name) for name in names)
    queued_s = _number(info, "queue_time")
    if not received or queued_s is None or not all(stamps):
        return []
    began, *rest = (stamp or 0.0 for stamp in stamps)
    unix = [began - queued_s, began, *rest]
    now_ns, now = time.monotonic_ns(), time.time()
    fits = all(a <= b for a, b in pairwise([received - _SLACK_S, *unix, now + _SLACK_S]))
    return [now_ns - round((now - stamp) * 1e9) for stamp in unix] if fits else []


def _times(info: Mapping[str, object]) -> dict[str, float]:
    """Return the times in s. Prefill lasts from the request's first forward pass to its first token."""
    stamps = [
        _number(info, name) for name in ("forward_entry_time", "prefill_finished_time", "request_finished_ts")
    ]
    times = {
        "queued_s": _number(info, "queue_time"),
        "prefill_s": _between(stamps[0], stamps[1]),
        "decode_s": _between(stamps[1], stamps[2]),
        "first_token_s": _number(info, "first_token_latency"),
        "latency_s": _number(info, "e2e_latency"),
    }
    return {name: round(value, 6) for name, value in times.items() if value is not None}


def _between(began: float | None, ended: float | None) -> float | None:
    return ended - began if began and ended and ended >= began else None


def _number(info: Mapping[str, object], name: str) -> float | None:
    value = info.get(name)
    return float(value) if isinstance(value, (int, float)) else None
