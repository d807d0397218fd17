"""Counters of SGLang, from its pages of metrics."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from stepscope.engines import metrics
from stepscope.engines.http import Server
from stepscope.files.counters import KV_CACHE, PREEMPTIONS

_ASK_S = 10.0
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable with the folder in which SGLang's processes keep their metrics. SGLang sets it."""
_NAMES = {
    "sglang:num_running_reqs": metrics.RUNNING,
    "sglang:num_queue_reqs": metrics.WAITING,
    "sglang:num_requests_total": metrics.FINISHED,
    "sglang:token_usage": KV_CACHE,
    "sglang:num_retracted_requests_total": PREEMPTIONS,
    "sglang:prompt_tokens_total": metrics.PROMPT_TOKENS,
    "sglang:generation_tokens_total": metrics.GENERATION_TOKENS,
    "sglang:cached_tokens_total": metrics.PREFIX_HITS,
    "sglang_num_running_reqs": metrics.RUNNING,
    "sglang_num_waiting_reqs": metrics.WAITING,
    "sglang_token_usage": KV_CACHE,
    "sglang_cache_hit_rate": metrics.HITS,
}
"""Names on the page `/metrics`, and below them those of `/v1/loads` -> those of counters."""


def counters(page: str) -> dict[str, float]:
    """Read the counters from a page. SGLang looks up every prompt token in its prefix cache."""
    values = metrics.read_page(page, _NAMES)
    if metrics.PROMPT_TOKENS in values and metrics.PREFIX_HITS in values:
        values[metrics.PREFIX_QUERIES] = values[metrics.PROMPT_TOKENS]
    return values


def counters_here() -> dict[str, float]:
    """Read the counters of this process' engines; empty if they keep no metrics (`enable_metrics`)."""
    client = sys.modules.get("prometheus_client")
    if client is None or _FOLDER not in os.environ:
        return {}
    multiprocess: Any = import_module("prometheus_client.multiprocess")
    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return counters(client.generate_latest(registry).decode())


def counters_of(server: Server) -> dict[str, float]:
    """Ask a server for its counters, also one that was launched without `--enable-metrics`.

    Raises:
        EngineError: it does not answer.
    """
    answer = server.request_now("GET", "/metrics", timeout_s=_ASK_S)
    if answer.status != 200:
        answer = server.request_now("GET", "/v1/loads?format=prometheus&include=core", timeout_s=_ASK_S)
    return counters(answer.body.decode(errors="replace")) if answer.status == 200 else {}
