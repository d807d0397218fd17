"""Names of events in a trace: the work that a kernel does, and an engine's annotations.

The patterns for vLLM and SGLang are here and not in the adapters, because a report is often made where no
adapter is installed. The functions that other packages give as entry points `stepscope.iterations` are
tried first.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import TypeAlias, cast

from stepscope.errors import ConfigError
from stepscope_report.timeline.activity.content import Iteration, Requests, Work

log = logging.getLogger("stepscope")
IterationName: TypeAlias = Callable[[str], Requests | None]
"""Function that returns the requests of an engine iteration from an annotation's name, or None for another
event."""
GROUP = "stepscope.iterations"

_COMMUNICATION = re.compile(
    r"nccl|.*ncclKernel|rccl|msccl|hccl|hcom_|.*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce|multimem_|nvshmem|quickreduce|deep_ep::int(er|ra)node|(one|two)_shot_)",
    re.IGNORECASE,
)
"""Names of kernels that communicate: of NCCL, RCCL, MSCCL, HCCL, vLLM, SGLang, flashinfer, DeepEP and
torch's symmetric memory."""
_MEMORY = re.compile(r"(hip)?mem(cpy|set)|dma", re.IGNORECASE)
_SYNC = frozenset({"event_wait", "event_record"})
"""Names of a stream's own events on MTIA."""
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):(?!send|recv)\w+")
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)\w*\)_generation_(\d+)\((?:sq)?\d+")
"""Name such as `execute_context_2(512)_generation_6(6)`. With `detailed_trace_annotation`, the parentheses
contain more."""
_SGLANG = re.compile(r"step\[(\w+) bs=(\d+)(?: toks=(\d+))?")
_DECODES = frozenset({"DECODE", "TARGET_VERIFY", "VERIFY"})
_PREFILLS = frozenset({"EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"})
"""Forward modes of SGLang that read prompts. `DRAFT` is left out: the draft model gives no tokens."""
_OF_TORCH = re.compile(
    r"\w*Backward\d*|Python(DispatchMode|Subclass)|AccumulateGrad|CopySlices|detach_?|record_param_comms"
)
"""Operators of torch itself whose names have no namespace."""


def work_of(cat: str, name: str) -> Work:
    """Return the kind of work of a device event: by category for copies and fills, else by name.

    The names come from NCCL, RCCL, HCCL, the all-reduce kernels of vLLM and SGLang, and the kernel types of
    HolisticTraceAnalysis.
    """
    if cat == "communication" or _COMMUNICATION.match(name) or _is_named(name):
        return "communication"
    if cat.lower() in ("gpu_memcpy", "gpu_memset", "memcpy", "memset") or _MEMORY.match(name):
        return "memory"
    return "sync" if name in _SYNC else "compute"


def named_collectives() -> str:
    """Return the user's patterns of collectives (`STEPSCOPE_COLLECTIVE_KERNELS`), or an empty text."""
    return os.environ.get("STEPSCOPE_COLLECTIVE_KERNELS", "")


def _is_named(name: str) -> bool:
    patterns = named_collectives()
    return bool(patterns) and _pattern(patterns).search(name) is not None


@cache
def _pattern(patterns: str) -> re.Pattern[str]:
    try:
        return re.compile(patterns)
    except re.error as error:
        raise ConfigError(
            "STEPSCOPE_COLLECTIVE_KERNELS",
            patterns,
            "a regular expression of kernel names",
            f"correct it: {error}",
        ) from error


def iteration_of(name: str, start_us: float = 0.0, dur_us: float = 0.0) -> Iteration | None:
    """Return the engine iteration that an annotation marks.

    Return None for other names, and for passes without a request. An engine runs such passes after its last
    request, or to keep up with other data-parallel engines.
    """
    requests = requests_of(name)
    if requests is None:
        return None
    return Iteration(
        start_us, dur_us, requests.prefills, requests.decodes, requests.prefill_tokens, requests.mixed
    )


@lru_cache(1 << 12)
def requests_of(name: str) -> Requests | None:
    """Return the requests in a name, by the functions of installed packages, else by the patterns here.

    Return None if no function or pattern fits, or if the name states no request.
    """
    for read in (*_installed(), _of_vllm, _of_sglang):
        try:
            requests = read(name)
        except Exception as error:
            _warn(f"{GROUP}: {read!r} failed: {error!r}")
            continue
        if requests is not None:
            return requests if requests.prefills or requests.decodes else None
    return None


@cache
def _warn(text: str) -> None:
    log.warning("stepscope: %s", text)


@cache
def _installed() -> tuple[IterationName, ...]:
    readers = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            readers.append(cast(IterationName, point.load()))
        except Exception as error:
            _warn(f"{GROUP}: {point.name} cannot be loaded: {error!r}")
    return tuple(readers)


def _of_vllm(name: str) -> Requests | None:
    match = _VLLM.match(name)
    if match is None:
        return None
    prefills, tokens, decodes = map(int, match.groups())
    return Requests(prefills, decodes, tokens)


def _of_sglang(name: str) -> Requests | None:
    match = _SGLANG.match(name)
    if match is None:
        return None
    mode, size, tokens = match[1], int(match[2]), match[3]
    if mode in _DECODES:
        return Requests(0, size, 0)
    if mode in _PREFILLS:
        return Requests(size, 0, None if tokens is None else int(tokens))
    return Requests(size, 0, None, mixed=True) if mode == "MIXED" else None


def is_range(name: str) -> bool:
    """Return whether an event of an operator's category is a range of the program. torch gives this category
    to ranges of `_RecordFunctionFast`, and before 1.12 to all ranges.
    """
    return "::" not in name and _OF_TORCH.fullmatch(name) is None


def is_collective(name: str) -> bool:
    """Return whether an annotation is a collective on the CPU, such as `gloo:all_reduce`."""
    return _COLLECTIVE.match(name) is not None
