"""Devices that this process has initialised. Nothing here imports torch or initialises a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from stepscope._recording.process import failures
from stepscope.config import ThroughputConfig
from stepscope.errors import ours
from stepscope.files.manifest.records import Hardware
from stepscope.files.values import bounded

_MODULES = (("torch", "cuda"), ("torch_npu", "npu"))
"""(library, its module) of devices; `torch_npu.npu` has the functions of `torch.cuda`. ROCm is `cuda` too."""


def read_hardware(config: ThroughputConfig) -> Hardware:
    """Return the device that this process computes on, with the configured figures. Raises nothing."""
    device = gpu = None
    try:
        for kind, module in initialised():
            device = bounded(str(module.get_device_name()))
            gpu = _gpu(module.current_device()) if kind == "cuda" else None
            break
    except ours() as error:  # a driver in trouble
        failures.warn("stepscope: the device of this process is unknown: %s", failures.describe(error))
    return Hardware(
        device=device,
        gpu=gpu,
        peak_tflops=config.device_peak_tflops,
        flops_per_token=config.flops_per_token,
    )


def _gpu(index: int) -> int | None:
    """Return the number that `nvidia-smi` shows for a device of torch, or None if it has a name instead."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    numbers = [int(name) if name.strip().isdecimal() else None for name in visible.split(",")]
    return numbers[index] if index < len(numbers) else None


def initialised() -> Iterator[tuple[str, Any]]:
    """Yield (`cuda` or `npu`, module) of the devices that this process has initialised."""
    for library, kind in _MODULES:
        module = getattr(sys.modules.get(library), kind, None)
        if module is not None and module.is_initialized():
            yield kind, module
