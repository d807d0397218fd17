"""The base of counters of devices, and the counters of NVIDIA GPUs. `dcmi` has the counters of Ascend NPUs.

GPUs are queried through NVML (the package nvidia-ml-py, whose module is `pynvml`), which does not create a
CUDA context. NVML lists every GPU of the host or container, with the numbers that `nvidia-smi` shows, and
ignores CUDA_VISIBLE_DEVICES. This module has not run on hardware yet; tests use the package's functions and
constants with made-up values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Generic, TypeVar

from stepscope._recording.counters.sampler import AbsentError
from stepscope.backends.counters import CounterSource
from stepscope.files.counters import GPU, GPU_MEMORY, GPU_THROTTLED, CounterKind, CounterScope

Handle = TypeVar("Handle")


class DeviceCounter(CounterSource, Generic[Handle]):
    """A counter that queries every device. A device whose query fails is not queried again."""

    scope: CounterScope = "host"

    def __init__(
        self,
        name: str,
        unit: str,
        query: Callable[[Handle], float],
        devices: Mapping[str, Handle],
        *,
        error: type[Exception],
        interval_s: float = 1.0,
        kind: CounterKind = "level",
    ) -> None:
        """
        Args:
            devices: {name: handle of the device}.
            error: Type of the exception if a query fails.
        """
        self.name = name
        self.unit = unit
        self.kind = kind
        self.interval_s = interval_s
        self._query = query
        self._devices = dict(devices)
        self._error = error

    def sample(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for name, device in tuple(self._devices.items()):
            try:
                values[name] = float(self._query(device))
            except self._error:
                del self._devices[name]
        return values


DRIVER = "/proc/driver/nvidia/version"
MISSING = "nvidia-ml-py is not installed. Fix: pip install 'stepscope[counters]'"


class _Utilisation(DeviceCounter[Any]):
    """The utilisation of GPUs. The `close` of this counter shuts NVML down for all GPU counters."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        self._nvml, self._pid = nvml, os.getpid()
        # NVML returns an average over the last 1/6 to 1 s.
        super().__init__(
            GPU, "%", lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, handles,
            error=nvml.NVMLError, interval_s=0.2, kind="interval",
        )  # fmt: skip

    def close(self) -> None:
        if os.getpid() == self._pid:  # NVML does not work in a forked child
            with suppress(self._error):
                self._nvml.nvmlShutdown()


def nvidia_gpus() -> Iterator[CounterSource]:
    """Yield the counters of this host's GPUs, or nothing if NVIDIA's driver is not loaded.

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
    yield _Utilisation(nvml, handles)
    queries: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        (GPU_MEMORY, "B", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        ("GPU power", "W", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        ("GPU SM clock", "MHz", lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        (GPU_THROTTLED, "", _throttle_query(nvml)),
    )
    for name, unit, query in queries:
        yield DeviceCounter(name, unit, query, handles, error=nvml.NVMLError)


def _throttle_query(nvml: Any) -> Callable[[Any], float]:
    """Return a query whose result is 1 while heat, power or the board's brake slows the GPU, else 0.

    In driver 535, NVIDIA renamed "throttle reasons" to "event reasons".
    """
    slow = (
        nvml.nvmlClocksThrottleReasonSwPowerCap
        | nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    return lambda gpu: float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & slow))
