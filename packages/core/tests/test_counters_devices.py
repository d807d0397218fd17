"""Counters of GPUs and NPUs, without one: libraries in C with the functions of NVIDIA's and Huawei's.

NVIDIA's own package, nvidia-ml-py, runs on that library. So its calls, structures and constants are real, and
only the numbers are not.
"""

# the names are NVIDIA's
from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from packages.core.tests.compiled import compiled, run_with
from stepscope._recording.counters import catalogue, devices
from stepscope._recording.counters.devices import nvidia_gpus
from stepscope._recording.counters.load import allocators
from stepscope._recording.counters.sampler import AbsentError
from stepscope._recording.process import identity
from tests.downloads import wheel

PYNVML = "nvidia-ml-py==13.615.71"

NVML_C = """
#include <stdio.h>
#include <stdlib.h>
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int gpus[2] = {0, 1};
int nvmlInitWithFlags(unsigned int flags) { return getenv("REFUSES") ? 18 : 0; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { puts("shut down"); return fflush(stdout); }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) { *handle = &gpus[index]; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, utilization *rates) {
    rates->gpu = *(int *)handle ? 97 : 0; rates->memory = 12; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *info) {
    info->total = 80ULL << 30; info->free = 79ULL << 30; info->used = 1ULL << 30; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts) {
    *milliwatts = 123456; return *(int *)handle ? 3 : 0; /* NVML_ERROR_NOT_SUPPORTED */ }
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned int *mhz) {
    *mhz = type == 1 ? 1410 : 1; return 0; /* NVML_CLOCK_SM */ }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    *reasons = *(int *)handle ? 0x20 : 0x1; return 0; /* heat; idle */ }
const char *nvmlErrorString(int result) { return "made up"; }
"""
SAMPLE_NVML = """
import json, os
from stepscope._recording.counters import devices as nvml
from stepscope._recording.counters.sampler import AbsentError
nvml.DRIVER = "/proc/self/stat"
sources = list(nvml.nvidia_gpus())
samples = [{source.name: dict(source.sample()) for source in sources} for _ in range(2)]
print(json.dumps([samples, [source.scope for source in sources]]), flush=True)
for source in sources:
    source.close()
os.environ["REFUSES"] = "1"
try:
    list(nvml.nvidia_gpus())
except AbsentError as error:
    print(error)
"""


def test_nvidias_package_on_a_library_of_its_functions_gives_every_counter(tmp_path: Path) -> None:
    library = compiled(tmp_path, "libnvidia-ml.so.1", NVML_C)
    read, shut, refused = run_with(library, SAMPLE_NVML, wheel(PYNVML)).splitlines()
    (first, second), scopes = json.loads(read)
    assert first == {
        "GPU utilisation": {"GPU 0": 0, "GPU 1": 97},
        "GPU memory": {"GPU 0": 1 << 30, "GPU 1": 1 << 30},
        "GPU power": {"GPU 0": 123.456},
        "GPU SM clock": {"GPU 0": 1410, "GPU 1": 1410},
        "GPU throttled": {"GPU 0": 0, "GPU 1": 1},
    }
    assert second == first  # the GPU without power is not asked again
    assert set(scopes) == {"host"}
    assert shut == "shut down"  # once for all of them
    assert "version mismatch" in refused


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(devices, "DRIVER", str(tmp_path / "version"))


def test_without_the_package_the_reason_names_it(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(AbsentError, match=r"'stepscope\[counters\]'"):
        list(nvidia_gpus())


def test_without_the_driver_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "DRIVER", str(tmp_path / "nothing"))
    assert list(nvidia_gpus()) == []


DCMI_C = """
struct hbm { unsigned long long memory_size; unsigned int freq; unsigned long long memory_usage;
             int temp; unsigned int bandwith_util_rate; };
int dcmi_init(void) { return 0; }
int dcmi_get_card_list(int *card_num, int *card_list, int list_len) {
    if (list_len < 2) return -8001;
    *card_num = 2; card_list[0] = 0; card_list[1] = 3; return 0; }
int dcmi_get_device_num_in_card(int card_id, int *device_num) { *device_num = 1; return 0; }
int dcmi_get_device_utilization_rate(int card_id, int device_id, int input_type, unsigned int *rate) {
    *rate = input_type == 2 ? 80 + card_id : 1; return 0; }
int dcmi_get_device_hbm_info(int card_id, int device_id, struct hbm *info) {
    info->memory_size = 65536; info->memory_usage = 2048; return 0; }
int dcmi_get_device_power_info(int card_id, int device_id, int *power) {
    *power = 1624; return card_id == 3 ? -8255 : 0; }
int dcmi_get_device_frequency(int card_id, int device_id, int input_type, unsigned int *frequency) {
    *frequency = input_type == 7 ? 1650 : 1; return 0; }
"""
SAMPLE_DCMI = """
import json, sys, types
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
from stepscope._recording.counters.dcmi import ascend_npus
sources = list(ascend_npus())
print(json.dumps([{source.name: dict(source.sample()) for source in sources} for _ in range(2)]))
"""


def test_a_library_with_the_functions_of_dcmi_gives_every_counter(tmp_path: Path) -> None:
    library = compiled(tmp_path, "libdcmi.so", DCMI_C)
    first, second = json.loads(run_with(library, SAMPLE_DCMI))
    assert first == {
        "NPU utilisation": {"NPU 0": 80, "NPU 1": 83},
        "NPU memory": {"NPU 0": 2 << 30, "NPU 1": 2 << 30},
        "NPU power": {"NPU 0": 162.4},
        "NPU AI core clock": {"NPU 0": 1650, "NPU 1": 1650},
    }
    assert second == first


def test_npus_are_looked_for_where_torch_npu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert list(catalogue._ascend_npus()) == []
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(AbsentError, match="npu-smi"):
        list(catalogue._ascend_npus())


def stats(allocated: int, reserved: int) -> dict[str, int]:
    return {"allocated_bytes.all.current": allocated, "reserved_bytes.all.current": reserved}


class Cuda:
    """The functions of torch.cuda that are used, for three devices; the process holds memory on one."""

    def __init__(self, initialised: bool = True) -> None:
        self.initialised = initialised

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return 3

    def memory_stats(self, device: int) -> dict[str, Any]:
        return stats(5, 8) if device == 1 else stats(0, 0)


@pytest.mark.parametrize(("library", "kind"), [("torch", "cuda"), ("torch_npu", "npu")])
def test_allocators_are_read_for_the_devices_that_hold_memory(
    monkeypatch: pytest.MonkeyPatch, library: str, kind: str
) -> None:
    for name, _ in identity._MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(**{kind: Cuda()}))
    assert {source.name: dict(source.sample()) for source in allocators()} == {
        "torch allocated": {f"{kind}:1": 5},
        "torch reserved": {f"{kind}:1": 8},
    }
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(**{kind: Cuda(False)}))
    assert [dict(source.sample()) for source in allocators()] == [{}, {}]


@pytest.mark.needs("torch")
def test_the_sampler_neither_initialises_cuda_nor_asks_what_torch_has_not() -> None:
    import torch

    assert [dict(source.sample()) for source in allocators()] == [{}, {}]
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    for name in ("is_initialized", "device_count", "memory_stats"):
        own = list(inspect.signature(getattr(Cuda(), name)).parameters)
        assert own == list(inspect.signature(getattr(torch.cuda, name)).parameters), name
