"""Stands in for SGLang's kernels, whose wheels are for GPUs. sglang 0.5.12 and older import these names on a
CPU too, but do not call them; every name raises if it is called. Names that sglang imports in a `try` are
absent.
"""

from __future__ import annotations

from typing import NoReturn


def _absent(*args: object, **options: object) -> NoReturn:
    raise NotImplementedError("a kernel of sgl-kernel, which is not installed here")


causal_conv1d_fwd = causal_conv1d_update = silu_and_mul = scaled_fp4_quant = _absent
