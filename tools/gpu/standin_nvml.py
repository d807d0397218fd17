"""Stand-in for NVIDIA's package nvidia-ml-py, for `--pretend`: one GPU, with the values of `standin_smi`.

The constants have the package's values. As in the old NVML call, `used` includes memory that the driver
reserves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from stepscope._recording.counters import devices
from tools.gpu.standin_smi import VALUES


def _value(field: str) -> float:
    return float(VALUES[field])


def library() -> Any:
    """Return a module `pynvml` with the functions and constants that stepscope uses."""
    return SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        NVML_CLOCK_SM=1,
        nvmlClocksThrottleReasonSwPowerCap=0x4,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=_value("utilization.gpu")),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(
            used=(_value("memory.used") + _value("memory.reserved")) * (1 << 20)
        ),
        nvmlDeviceGetPowerUsage=lambda gpu: _value("power.draw") * 1000,
        nvmlDeviceGetClockInfo=lambda gpu, kind: _value("clocks.sm"),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0,
    )


@contextmanager
def standing_in() -> Iterator[None]:
    """Replace the package by the stand-in during the block, and make a driver appear to be installed."""
    with patch.dict(sys.modules, {"pynvml": library()}), patch.object(devices, "DRIVER", __file__):
        yield
