"""NVIDIA GPUs of the host, by NVML (the package nvidia-ml-py, whose module is `pynvml`).

NVML makes no CUDA context. It sees every GPU of the host or container, whatever CUDA_VISIBLE_DEVICES says, by
the numbers that `nvidia-smi` shows. Never run on hardware: tests use the functions and constants of the
package with values of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from stepscope.counters import CounterSource
from stepscope.files.counters import GPU, GPU_MEMORY, CounterKind, CounterScope
from stepscope.recording.counters.sampler import AbsentError

DRIVER = "/proc/driver/nvidia/version"
MISSING = "nvidia-ml-py is not installed. Fix: pip install 'stepscope[counters]'"


class NvmlCounter(CounterSource):
    """One query of NVML, of every GPU. A GPU that does not support it is not asked again."""

    scope: CounterScope = "host"

    def __init__(
        self,
        name: str,
        unit: str,
        query: Callable[[Any], float],
        handles: Mapping[str, Any],
        *,
        error: type[Exception],
        interval_s: float,
        kind: CounterKind = "level",
        end: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.unit = unit
        self.kind = kind
        self.interval_s = interval_s
        self._query = query
        self._handles = dict(handles)
        self._error = error
        self._end = end
        self._pid = os.getpid()

    def sample(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for gpu, handle in tuple(self._handles.items()):
            try:
                values[gpu] = float(self._query(handle))
            except self._error:
                del self._handles[gpu]
        return values

    def close(self) -> None:
        if self._end is not None and os.getpid() == self._pid:  # NVML does not outlive a fork
            with suppress(self._error):
                self._end()


def nvidia_gpus() -> Iterator[CounterSource]:
    """Yield the counters of this host's GPUs. Nothing where NVIDIA's driver is not loaded.

    Raises:
        AbsentError: the package is not installed, or NVML cannot be used.
    """
    if not os.path.exists(DRIVER):
        return
    try:
        nvml = import_module("pynvml")
    except ImportError:
        raise AbsentError(MISSING) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise AbsentError(f"NVML cannot be used: {error}") from None
    try:
        handles = {
            f"GPU {index}": nvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(nvml.nvmlDeviceGetCount())
        }
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise AbsentError(f"NVML lists no GPUs: {error}") from None
    yield from _counters(nvml, handles)


def _counters(nvml: Any, handles: Mapping[str, Any]) -> Iterator[CounterSource]:
    error: type[Exception] = nvml.NVMLError
    throttled = _throttle_query(nvml)
    # NVML's own figure is an average over the last 1/6 to 1 s. The first source ends NVML for all.
    yield NvmlCounter(
        GPU, "%", lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, handles,
        error=error, interval_s=0.2, kind="interval", end=nvml.nvmlShutdown,
    )  # fmt: skip
    queries: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        (GPU_MEMORY, "B", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        ("GPU power", "W", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        ("GPU SM clock", "MHz", lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        ("GPU throttled", "", throttled),
    )
    for name, unit, query in queries:
        yield NvmlCounter(name, unit, query, handles, error=error, interval_s=1.0)


def _throttle_query(nvml: Any) -> Callable[[Any], float]:
    """Return the query for 1 where the GPU runs slower than it could: heat, power, or the board's brake.

    NVIDIA renamed the function and its bits from "throttle reasons" to "event reasons" in driver 535.
    """
    slow = (
        nvml.nvmlClocksThrottleReasonSwPowerCap
        | nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    return lambda gpu: float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & slow))
