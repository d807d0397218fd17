"""Facts of an engine (layout, scheduler), and the times of a request in it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

Fact: TypeAlias = str | int | float | bool | None

_METRICS = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage",  # its name until vLLM 0.9
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:iteration_tokens_total_count": "iterations",
}
"""vLLM's Prometheus names -> ours."""
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)

_PHASES = ("queue", "prefill", "decode")
_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""Of `RequestStateStats`, in s of the engine core's monotonic clock; 0 means not reached."""
_SLACK_S = 0.05
"""By which the wall clock may have been set between a request's arrival and its end."""


class TimedSpan(Protocol):
    """Used part of what `span`, `turn` and `trajectory` return."""

    def set(self, **attrs: Fact) -> None: ...

    def add(self, stage: str, start_ns: int, end_ns: int, *, role: str | None = None) -> None: ...


def record_request(span: TimedSpan, output: object) -> None:
    """Says on the span around a request where its time went: `request_facts` as attributes, below it spans
    `queue`, `prefill` and `decode` of role `rollout`, as the engine timed them.

    Args:
        span: The turn or span that made the request and waited for it, still open.
        output: vLLM's `RequestOutput`, finished. Without its `metrics`, or from an engine core of another
            host, whose clock is not this one's, there are no spans, only attributes.
    """
    span.set(**request_facts(output))
    stamps = _stamps_here(getattr(output, "metrics", None))
    for stage, (began, ended) in zip(_PHASES, pairwise(stamps), strict=False):
        span.add(stage, round(began * 1e9), round(ended * 1e9), role="rollout")


def _stamps_here(stats: Any) -> list[float]:
    """Of a request that is over, on this process' monotonic clock; none where they are not of this clock."""
    stamps = [float(getattr(stats, name, 0.0)) for name in _STAMPS]
    arrived = float(getattr(stats, "arrival_time", 0.0))  # the one that is on the wall clock, of this process
    now = time.monotonic()
    earliest, latest = now - (time.time() - arrived) - _SLACK_S, now + _SLACK_S
    fits = all(a <= b for a, b in pairwise([earliest, *stamps, latest]))
    return stamps if arrived and fits else []


def request_facts(output: object) -> dict[str, str | int | float]:
    """Return where one request spent its time, for the span around it: `span.set(**request_facts(output))`.

    Args:
        output: vLLM's `RequestOutput`, finished. Its `metrics` are there unless the engine was built with
            `disable_log_stats=True`, which is what `LLM` does by default; without them only the counts are.

    Returns:
        `request_id`, `prompt_tokens`, `cached_tokens`, `output_tokens`, `finish_reason`; with metrics also
        `queued_s`, `prefill_s`, `decode_s`, `first_token_s`, `preemptions`.
    """
    found: dict[str, str | int | float] = {"request_id": str(getattr(output, "request_id", ""))}
    outputs = getattr(output, "outputs", None) or ()
    found["prompt_tokens"] = len(getattr(output, "prompt_token_ids", None) or ())
    found["output_tokens"] = sum(len(each.token_ids) for each in outputs)
    cached = getattr(output, "num_cached_tokens", None)
    if cached is not None:
        found["cached_tokens"] = int(cached)
    reasons = {str(each.finish_reason) for each in outputs if each.finish_reason}
    if reasons:
        found["finish_reason"] = ",".join(sorted(reasons))
    found.update(_times(getattr(output, "metrics", None)))
    return found


def _times(stats: Any) -> dict[str, int | float]:
    stamps = [getattr(stats, name, 0.0) for name in _STAMPS]
    found: dict[str, int | float] = {}
    for name, (began, ended) in zip(("queued_s", "prefill_s", "decode_s"), pairwise(stamps), strict=False):
        if began and ended:
            found[name] = round(ended - began, 6)
    if getattr(stats, "first_token_latency", 0.0):
        found["first_token_s"] = round(stats.first_token_latency, 6)
    if hasattr(stats, "num_preemptions"):
        found["preemptions"] = int(stats.num_preemptions)
    return found


def of_config(config: Any, world_size: int) -> dict[str, Fact]:
    """Model and layout, of a `VllmConfig`."""
    parallel, model = config.parallel_config, config.model_config
    return {
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": int(model.max_model_len),
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "data_parallel_size": int(getattr(parallel, "data_parallel_size", 1) or 1),
        "gpus": world_size,
    }


def scheduler_here() -> dict[str, Fact]:
    """Of the engines of this process, where they keep statistics; empty where they do not."""
    client = sys.modules.get("prometheus_client")
    return {} if client is None else scheduler(client.generate_latest().decode())


def scheduler(text: str) -> dict[str, Fact]:
    """Read the scheduler's metrics from a Prometheus page of vLLM, summed over its data-parallel engines."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _METRICS:
            found[_METRICS[name]] = found.get(_METRICS[name], 0.0) + float(value)
    return {name: round(value, 6) for name, value in found.items()}


def between(before: Mapping[str, Fact], after: Mapping[str, Fact]) -> dict[str, Fact]:
    """Both readings, for a sidecar: `requests_running_at_start`, `requests_running_at_stop`..."""
    return {**_suffixed(before, "at_start"), **_suffixed(after, "at_stop")}


def _suffixed(facts: Mapping[str, Fact], when: str) -> dict[str, Fact]:
    counted: Iterable[str] = set(_METRICS.values())
    return {f"{name}_{when}": value for name, value in facts.items() if name in counted}


def steady(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the facts that do not change while an engine lives."""
    counted = set(_METRICS.values())
    return {name: value for name, value in facts.items() if name not in counted}
