"""What the name of an event in a trace says: which work a kernel does, what an engine's annotation tells."""

from __future__ import annotations

import re

from stepscope.timeline.activity.content import Iteration, Work

_COMMUNICATION = re.compile(r"nccl|.*ncclKernel|rccl|hccl|.*cross_device_reduce|.*multimem_all_?reduce")
_MEMORY = re.compile(r"(hip)?mem(cpy|set)|dma", re.IGNORECASE)
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):(?!send|recv)\w+")
_VLLM = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
_SGLANG = re.compile(r"step\[(\w+) bs=(\d+)(?: toks=(\d+))?")


def work_of(cat: str, name: str) -> Work:
    """What a device event is: by category for copies and fills, else by name.

    Source of the names: NCCL, RCCL, HCCL, the all-reduce kernels of vLLM and SGLang, and the kernel types of
    HolisticTraceAnalysis.
    """
    if _COMMUNICATION.match(name):
        return "communication"
    if cat.lower() in ("gpu_memcpy", "gpu_memset", "memcpy", "memset") or _MEMORY.match(name):
        return "memory"
    return "compute"


def iteration_of(name: str, start_us: float = 0.0, dur_us: float = 0.0) -> Iteration | None:
    """An engine's annotation, read: vLLM's `execute_context_..`, SGLang's `step[..]`. None: it is no such."""
    if found := _VLLM.match(name):
        prefills, tokens, decodes, _ = map(int, found.groups())
        return Iteration(start_us, dur_us, prefills, decodes, tokens)
    if found := _SGLANG.match(name):
        mode, size, toks = found.groups()
        if mode in ("DECODE", "TARGET_VERIFY"):
            return Iteration(start_us, dur_us, 0, int(size), 0)
        if mode != "IDLE":
            return Iteration(start_us, dur_us, int(size), 0, None if toks is None else int(toks))
    return None


def is_collective(name: str) -> bool:
    """Whether an annotation is a collective on the CPU: `gloo:all_reduce`, from its start to its end."""
    return _COLLECTIVE.match(name) is not None
