"""Stands in for SGLang's kernels, whose wheels are for GPUs: sglang 0.5.12 and older import these names on a
CPU too. None is called there; each raises if it is. Names imported on trial are absent, as without it.
"""

from __future__ import annotations

from typing import NoReturn


def _absent(*args: object, **options: object) -> NoReturn:
    raise NotImplementedError("a kernel of sgl-kernel, which is not installed here")


causal_conv1d_fwd = causal_conv1d_update = silu_and_mul = scaled_fp4_quant = _absent
