"""Names of events in a trace: the work that a kernel does, and an engine's annotations."""

from __future__ import annotations

import re

from stepscope.timeline.activity.content import Iteration, Work

_COMMUNICATION = re.compile(r"nccl|.*ncclKernel|rccl|hccl|.*cross_device_reduce|.*multimem_all_?reduce")
_MEMORY = re.compile(r"(hip)?mem(cpy|set)|dma", re.IGNORECASE)
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):(?!send|recv)\w+")
_VLLM = re.compile(
    r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)(?:sk\d+sqsq\d+sqsk\d+)?\)_generation_(\d+)\((?:sq)?\d+"
)
"""`execute_context_2(512)_generation_6(6)`, or with `detailed_trace_annotation` more in the brackets."""
_SGLANG = re.compile(r"step\[(\w+) bs=(\d+)(?: toks=(\d+))?")
_DECODES = frozenset({"DECODE", "TARGET_VERIFY", "VERIFY"})
_PREFILLS = frozenset({"EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"})
"""Of SGLang's forward modes. Passes of a draft model (`DRAFT`) generate nothing by themselves."""


def work_of(cat: str, name: str) -> Work:
    """Return the work of a device event: by category for copies and fills, else by name.

    Source of the names: NCCL, RCCL, HCCL, the all-reduce kernels of vLLM and SGLang, and the kernel types of
    HolisticTraceAnalysis.
    """
    if _COMMUNICATION.match(name):
        return "communication"
    if cat.lower() in ("gpu_memcpy", "gpu_memset", "memcpy", "memset") or _MEMORY.match(name):
        return "memory"
    return "compute"


def iteration_of(name: str, start_us: float = 0.0, dur_us: float = 0.0) -> Iteration | None:
    """Read an engine's annotation: vLLM's `execute_context_..`, SGLang's `step[..]`.

    None for other names, and for passes without a request: engines run these after the last one, or to keep
    step with others.
    """
    if found := _VLLM.match(name):
        prefills, tokens, decodes = map(int, found.groups())
        return Iteration(start_us, dur_us, prefills, decodes, tokens) if prefills or decodes else None
    if found := _SGLANG.match(name):
        mode, size, toks = found[1], int(found[2]), found[3]
        if not size:
            return None
        if mode in _DECODES:
            return Iteration(start_us, dur_us, 0, size, 0)
        if mode in _PREFILLS:
            return Iteration(start_us, dur_us, size, 0, None if toks is None else int(toks))
        if mode == "MIXED":
            return Iteration(start_us, dur_us, size, 0, None, mixed=True)
    return None


def is_collective(name: str) -> bool:
    """Whether an annotation is a collective on the CPU: `gloo:all_reduce`, from its start to its end."""
    return _COLLECTIVE.match(name) is not None
