"""Worker extensions for `more_main.py`, for what a test must do inside a worker."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from stepscope_vllm import WorkerExtension

_NEW_MOUNTS, _NEW_NAMES = 0x00020000, 0x04000000
_RECURSIVE_PRIVATE = 0x4000 | 1 << 18


class Pipeline(WorkerExtension):
    """Makes the dummy run in which a later pipeline stage gets its input buffers. vLLM 0.32's eager CPU
    worker leaves this run out.
    """

    def fill_pipeline(self) -> None:
        from vllm.distributed import get_pp_group

        runner: Any = getattr(self, "model_runner")  # noqa: B009  # of the worker that this is mixed into
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class Experts:
    """Maps numbers of all experts to numbers of the worker's own. vLLM 0.32 omits this on CPUs, and dies.

    The class does not inherit from `WorkerExtension`, so captures recognise files by their names.
    """

    def map_experts(self) -> None:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        kind: Any = CPUUnquantizedExperts
        apply = kind.apply

        def mapped(experts: object, **given: Any) -> Any:
            own = given["expert_map"][given["topk_ids"].long()]  # -1 for an expert of another worker
            given["topk_weights"] = given["topk_weights"] * (own >= 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
            return apply(experts, **given)

        kind.apply = mapped


class OtherHost(WorkerExtension):
    """A worker that can act as if on another host, with another host name and an empty disk at a path."""

    def move_away(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        _checked(libc.unshare(_NEW_MOUNTS | _NEW_NAMES))
        _checked(libc.sethostname(b"other-host", 10))
        _checked(libc.mount(b"none", b"/", None, _RECURSIVE_PRIVATE, None))
        _checked(libc.mount(b"none", path.encode(), b"tmpfs", 0, None))


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
