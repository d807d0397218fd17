"""Facts of one SGLang engine: its version, its device, its parallel layout, and its counters."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.engines import metrics, name_settings
from stepscope.engines.artifacts import Option
from stepscope.engines.http import Server
from stepscope.errors import EngineError
from stepscope.files.counters import KV_CACHE, PREEMPTIONS
from stepscope.files.manifest import Knob, Named, is_number

SETTINGS: Mapping[Knob, tuple[str, bool]] = {
    "cuda_graphs": ("disable_cuda_graph", False),
    "data_parallel": ("dp_size", True),
    "kv_memory": ("mem_fraction_static", True),
    "max_requests": ("max_running_requests", True),
    "mixed_prefill": ("enable_mixed_chunk", True),
    "prefix_caching": ("disable_radix_cache", False),
    "tensor_parallel": ("tp_size", True),
}
"""{knob: (field of `ServerArgs`, value that turns the knob on)}."""


_ASK_S = 10.0
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable, set by SGLang, that names the folder in which SGLang's processes keep their metrics."""
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
"""{SGLang's name: name of the counter}. First the names on the page `/metrics`, then those of `/v1/loads`."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one engine: one TokenizerManager with its schedulers."""

    version: str | None
    options: frozenset[str]
    """Options that the start of the engine's profiler accepts."""
    device: str
    tp: int
    dp: int
    pp: int
    dp_attention: bool
    """True if the data-parallel ranks share the GPUs of the tensor-parallel ranks."""
    sleep_on_idle: bool
    """True if an idle scheduler sleeps. Otherwise an idle scheduler polls for requests, and traces contain
    each poll."""
    speculative: bool
    disaggregation: str | None
    """`prefill` or `decode` for a server that runs only this stage; None for an engine that runs both
    stages."""
    metrics: bool
    """True if the engine's answers contain times."""
    forced_off: frozenset[str] = frozenset()
    """Options that the engine's environment switches off."""
    profile_v2: bool = False
    """True if the engine is known to use SGLang's second profiler (SGLANG_PROFILE_V2)."""
    rpd: bool | None = None
    """True if the engine's environment has the library for the activity RPD; None if unknown."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * (1 if self.dp_attention else self.dp)

    def sidecar(self) -> dict[str, Option]:
        return {
            "device": self.device,
            "tp_size": self.tp,
            "dp_size": self.dp,
            "pp_size": self.pp,
            "dp_attention": self.dp_attention,
            "sleep_on_idle": self.sleep_on_idle,
            "disaggregation_mode": self.disaggregation,
        }


def facts_of(
    settings: Mapping[str, object],
    *,
    version: str | None,
    options: frozenset[str],
    forced_off: frozenset[str] = frozenset(),
    profile_v2: bool = False,
    rpd: bool | None = None,
) -> EngineFacts:
    """Return the facts in an engine's resolved `ServerArgs`, and name its settings for advice."""
    name_settings("sglang", settings_of(settings), version=version, engine=True)
    mode = settings.get("disaggregation_mode")
    return EngineFacts(
        version=version,
        options=options,
        device=str(settings.get("device") or "cuda"),
        tp=_size(settings, "tp_size"),
        dp=_size(settings, "dp_size"),
        pp=_size(settings, "pp_size"),
        dp_attention=bool(settings.get("enable_dp_attention")),
        sleep_on_idle=bool(settings.get("sleep_on_idle")),
        speculative=settings.get("speculative_algorithm") is not None,
        disaggregation=str(mode) if mode in ("prefill", "decode") else None,
        metrics=bool(settings.get("enable_metrics")),
        forced_off=forced_off,
        profile_v2=profile_v2,
        rpd=rpd,
    )


def settings_of(settings: Mapping[str, object]) -> dict[Knob, Named]:
    """Return the settings that advice may suggest to change, except those that this version lacks."""
    named: dict[Knob, Named] = {}
    for knob, (field, better) in SETTINGS.items():
        value = settings.get(field)
        if field in settings and is_number(value):
            named[knob] = (field, value, better)
    return named


def _size(settings: Mapping[str, object], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 1


def counters(page: str) -> dict[str, float]:
    """Return {name of the counter: value} from a page of metrics. Prompt tokens count as looked up in the
    prefix cache, because SGLang looks up each prompt token.
    """
    values = metrics.read_page(page, _NAMES)
    if metrics.PROMPT_TOKENS in values and metrics.PREFIX_HITS in values:
        values[metrics.PREFIX_QUERIES] = values[metrics.PROMPT_TOKENS]
    return values


def counters_here(pids: Collection[int] | None) -> dict[str, float]:
    """Return the counters of this process' engines; empty without `enable_metrics`.

    Args:
        pids: Ids of the processes whose counters are read; None for all processes in the folder of metrics.
    """
    if "prometheus_client" not in sys.modules or _FOLDER not in os.environ:
        return {}
    client, multiprocess = import_module("prometheus_client"), import_module("prometheus_client.multiprocess")
    files = [
        str(file)
        for file in Path(os.environ[_FOLDER]).glob("*.db")
        if pids is None or int(file.stem.rpartition("_")[2]) in pids
    ]
    merged = metrics.Collected(multiprocess.MultiProcessCollector.merge(files))
    return counters(client.generate_latest(merged).decode())


def counters_of(server: Server) -> dict[str, float]:
    """Return the counters of a server, even if it was started without `--enable-metrics`.

    Raises:
        EngineError: the server does not answer.
    """
    answer = server.request_now("GET", "/metrics", timeout_s=_ASK_S)
    if answer.status != 200:
        answer = server.request_now("GET", "/v1/loads?format=prometheus&include=core", timeout_s=_ASK_S)
    return counters(answer.body.decode(errors="replace")) if answer.status == 200 else {}


class EngineDiedError(EngineError):
    """The engine has died, and writes no more files."""


class RefusedError(EngineError):
    """The engine understood the request, and refused the request."""


class AlreadyRecordingError(RefusedError):
    """The engine refused a start because its profiler already runs."""


ALREADY_RECORDING = "already in progress"
"""Part of SGLang's message when it refuses a start because its profiler already runs."""


def refusal(message: str, reason: str) -> RefusedError:
    """Return the error for a request that SGLang refused.

    Args:
        message: Text of the error.
        reason: SGLang's own message, which decides the class of the error.
    """
    kind = AlreadyRecordingError if ALREADY_RECORDING in reason else RefusedError
    return kind(message)


class Target(Protocol):
    """An engine that can be recorded, in this process or behind HTTP.

    The methods block. They are called on the thread of the profiler that owns the target.
    """

    remote: bool
    """True if the engine is not a child of this process, so that it may belong to another user or run on
    another host."""
    engine: object
    """Identity of the engine. Targets of the same engine have equal values."""

    def facts(self) -> EngineFacts: ...

    def start(self, request: Mapping[str, object]) -> None:
        """Start the profiler.

        Raises:
            RefusedError: the engine refuses the request.
            EngineError: the engine cannot be reached.
        """
        ...

    def stop(self) -> None:
        """Stop the profiler, and return when the files are written.

        Raises:
            RefusedError: the profiler does not run.
        """
        ...

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        """Return the state of each data-parallel scheduler; empty if this version of SGLang shows no states.

        Raises:
            EngineError: the engine does not answer within `patience_s`.
        """
        ...
