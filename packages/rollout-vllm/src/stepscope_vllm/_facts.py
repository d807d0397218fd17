"""What an engine says of itself (layout, scheduler), and where a request spent its time."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Fact: TypeAlias = str | int | float | bool | None

_METRICS = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage",  # its name until vLLM 0.9
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:num_preemptions_total": "preemptions",
}
"""vLLM's Prometheus names -> ours."""
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)

_ENVIRONMENT = {
    "torch_profiler_dir": "VLLM_TORCH_PROFILER_DIR",
    "torch_profiler_with_stack": "VLLM_TORCH_PROFILER_WITH_STACK",
    "torch_profiler_record_shapes": "VLLM_TORCH_PROFILER_RECORD_SHAPES",
    "torch_profiler_with_memory": "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    "torch_profiler_with_flops": "VLLM_TORCH_PROFILER_WITH_FLOPS",
}
"""Settings before there was a `ProfilerConfig` (vLLM 0.12 and older)."""


def request_facts(output: object) -> dict[str, str | int | float]:
    """Where one request spent its time, for the span around it: `span.set(**request_facts(output))`.

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
    """Of `RequestStateStats`, whose stamps are of the engine core's monotonic clock; 0 means not reached."""
    stamps = [
        getattr(stats, f"{name}_ts", 0.0) for name in ("queued", "scheduled", "first_token", "last_token")
    ]
    found: dict[str, int | float] = {}
    for name, began, ended in zip(("queued_s", "prefill_s", "decode_s"), stamps, stamps[1:], strict=False):
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
    """What a Prometheus page of vLLM says of its scheduler, summed over its data-parallel engines."""
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
    """Those that do not change while an engine lives."""
    counted = set(_METRICS.values())
    return {name: value for name, value in facts.items() if name not in counted}


def settings_of_environment() -> dict[str, object]:
    """As a `ProfilerConfig` would have them."""
    folder = os.environ.get("VLLM_TORCH_PROFILER_DIR")
    if not folder:
        return {}
    found: dict[str, object] = {"profiler": "torch", "torch_profiler_dir": os.path.abspath(folder)}
    for field, variable in _ENVIRONMENT.items():
        if field != "torch_profiler_dir":
            default = "1" if field == "torch_profiler_with_stack" else "0"
            found[field] = os.environ.get(variable, default) != "0"
    return found
