"""Stand-in for NVIDIA's package nvidia-ml-py, for `--pretend`: one GPU, with the values of `standin_smi`.

The constants are those of the package. Like NVML's first version of the call, `used` holds what the driver
reserves too.
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
    """Return the functions and constants that stepscope uses of the module `pynvml`."""
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
    """Put the stand-in into the place of the package, and let its driver seem to be there."""
    with patch.dict(sys.modules, {"pynvml": library()}), patch.object(devices, "DRIVER", __file__):
        yield
