"""Facts of an engine: its model, its layout, and the metrics of its scheduler."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from stepscope.engines import EngineCapture, metrics
from stepscope.engines.artifacts import Option
from stepscope.files.counters import KV_CACHE, PREEMPTIONS
from stepscope.files.manifest import Knob, Named, is_number
from stepscope.files.passes import PassFile
from stepscope_vllm._files.traces import Layout

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
"""{vLLM's Prometheus name: name in sidecars}."""
_COUNTERS = {
    "vllm:num_requests_running": metrics.RUNNING,
    "vllm:num_requests_waiting": metrics.WAITING,
    "vllm:request_success_total": metrics.FINISHED,
    "vllm:kv_cache_usage_perc": KV_CACHE,
    "vllm:gpu_cache_usage_perc": KV_CACHE,
    "vllm:num_preemptions_total": PREEMPTIONS,
    "vllm:prompt_tokens_total": metrics.PROMPT_TOKENS,
    "vllm:generation_tokens_total": metrics.GENERATION_TOKENS,
    "vllm:prefix_cache_queries_total": metrics.PREFIX_QUERIES,
    "vllm:prefix_cache_hits_total": metrics.PREFIX_HITS,
    "vllm:gpu_prefix_cache_queries_total": metrics.PREFIX_QUERIES,  # their names until vLLM 0.9
    "vllm:gpu_prefix_cache_hits_total": metrics.PREFIX_HITS,
}
"""{vLLM's Prometheus name: name of the counter}."""
SETTINGS: Mapping[Knob, tuple[str, str]] = {
    "cuda_graphs": ("model_config", "enforce_eager"),
    "data_parallel": ("parallel_config", "data_parallel_size"),
    "kv_memory": ("cache_config", "gpu_memory_utilization"),
    "max_requests": ("scheduler_config", "max_num_seqs"),
    "mixed_prefill": ("scheduler_config", "enable_chunked_prefill"),
    "prefix_caching": ("cache_config", "enable_prefix_caching"),
    "tensor_parallel": ("parallel_config", "tensor_parallel_size"),
}
"""{knob: (part of a `VllmConfig`, field of the part)}. vLLM's argument has the name of the field."""


def of_config(config: Any, world_size: int) -> dict[str, Fact]:
    """Return the model and the layout in a `VllmConfig`, for sidecars."""
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


def settings_of(config: Any) -> dict[Knob, Named]:
    """Return the settings in a `VllmConfig` that advice may suggest to change. Settings that this version
    lacks are left out.
    """
    settings: dict[Knob, Named] = {}
    for knob, (part, field) in SETTINGS.items():
        value = getattr(getattr(config, part, None), field, None)
        if value is not None and is_number(value):
            settings[knob] = (field, value, knob != "cuda_graphs")
    return settings


def scheduler_here(engine: object) -> dict[str, Fact]:
    """Return {name in sidecars: value} of the metrics of an engine's scheduler, for an engine of this
    process. Empty if the engine keeps no statistics.
    """
    return scheduler(_page_of(engine, _METRICS))


def counters_here(engine: object) -> dict[str, float]:
    """Return {name of the counter: value} of an engine of this process; empty if the engine keeps no
    statistics.
    """
    return counters(_page_of(engine, _COUNTERS))


def _page_of(engine: object, names: Iterable[str]) -> str:
    """Return a Prometheus page with the named metrics of an engine; empty with `disable_log_stats`.

    The Prometheus registry holds only the metrics of the newest engine. So the metrics are collected from the
    engine's own logger, or from the registry if this version has no such logger. Only the named metrics are
    collected, because collecting all takes 10 ms.
    """
    inner = getattr(engine, "llm_engine", engine)
    client = sys.modules.get("prometheus_client")
    if client is None or not getattr(inner, "log_stats", True):
        return ""
    loggers = getattr(getattr(inner, "logger_manager", None), "stat_loggers", ())
    own = [metric for logger in loggers for metric in _metrics_in(getattr(logger, "__dict__", {}), names)]
    families = (family for metric in own for family in metric.collect())
    registry = metrics.Collected(families) if own else client.REGISTRY.restricted_registry(list(names))
    page: bytes = client.generate_latest(registry)
    return page.decode()


def _metrics_in(held: object, names: Iterable[str]) -> Iterator[Any]:
    """Yield the named metrics in `held`, a metric or nested dictionaries of metrics."""
    if isinstance(held, dict):
        for value in held.values():
            yield from _metrics_in(value, names)
    elif hasattr(held, "collect") and any(name.startswith(getattr(held, "_name", "")) for name in names):
        yield held


def unfinished(engine: object) -> dict[str, float]:
    """Return {name of the counter: number of requests that an engine's front end has not answered}. Empty if
    this version has no such number.
    """
    processor = getattr(getattr(engine, "llm_engine", engine), "output_processor", None)
    count = getattr(processor, "get_num_unfinished_requests", None)
    return {} if count is None else {metrics.UNFINISHED: float(count())}


def counters(page: str) -> dict[str, float]:
    """Return {name of the counter: value} from a Prometheus page of vLLM."""
    return metrics.read_page(page, _COUNTERS)


def scheduler(page: str) -> dict[str, Fact]:
    """Return {name in sidecars: value} of the scheduler's metrics on a Prometheus page of vLLM, summed over
    the data-parallel engines.
    """
    sums = metrics.read_page(page, _METRICS, percents=())
    return {name: round(value, 6) for name, value in sums.items()}


def between(before: Mapping[str, Fact], after: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the metrics at the start and at the stop under the names in a sidecar, such as
    `requests_running_at_start`.
    """
    readings = (("at_start", before), ("at_stop", after))
    return {
        f"{name}_{when}": value
        for when, facts in readings
        for name, value in facts.items()
        if name in _METRICS.values()
    }


def steady(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return those of `facts` that do not change while an engine lives, which are all except metrics."""
    return {name: value for name, value in facts.items() if name not in _METRICS.values()}


PASSES_NEEDED = (
    "Fix: install stepscope-rollout-vllm in the environment of the engine's processes (with `stepscope` in "
    "VLLM_PLUGINS, if that is set; servers need vLLM 0.32), or set engine.passes: 0"
)
"""Fix for an engine that notes no passes."""


class Started(NamedTuple):
    """Facts about a recording that has begun."""

    folder: Path
    """Folder in which the recording's files appear."""
    named: bool
    """True if the names of the files begin with the capture's name."""
    aimed: bool
    """True if the files are written to the capture's folder (`extension.aim`)."""
    by_others: bool = False
    """True if another tool (nsys) writes the recording, not vLLM."""


class Target(Protocol):
    """An engine that can be recorded: one in this process, or one behind HTTP."""

    @property
    def version(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """Folder that the engine writes to, or None if unknown."""
        ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the engine was built with; empty if unknown."""
        ...

    @property
    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Reports of the engine's workers after the latest stop (`WorkerExtension.stepscope_release`)."""
        ...

    def take_passes(self) -> Sequence[PassFile]:
        """Return and remove the notes of the engine's passes in the latest recording. May block."""
        ...

    def facts(self) -> dict[str, Option]:
        """Return the engine's layout and metrics. May block."""
        ...

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started: ...

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        ...
