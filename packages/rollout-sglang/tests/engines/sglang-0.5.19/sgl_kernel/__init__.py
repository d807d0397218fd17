"""Stands in for SGLang's kernels, whose wheels are for GPUs. sglang 0.5.16 and later import names that end
with `_cpu` if SGLANG_USE_CPU_ENGINE is set, as verl sets it, but do not call them; every name raises if it is
called.
"""

from __future__ import annotations

from typing import NoReturn


def _absent(*args: object, **options: object) -> NoReturn:
    raise NotImplementedError("a kernel of sgl-kernel, which is not installed here")


causal_conv1d_fwd = causal_conv1d_update = silu_and_mul = scaled_fp4_quant = _absent


def __getattr__(name: str) -> object:
    if name.endswith("_cpu"):
        return _absent
    raise AttributeError(name)
