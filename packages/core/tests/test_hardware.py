"""The device of a process, as its part of the manifest names it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope import ProfileConfig, capture
from stepscope._recording.process.identity import read_hardware
from stepscope.config import ThroughputConfig
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Hardware
from stepscope.files.manifest_parts import read_parts


def device_module(name: str, *, initialised: bool) -> SimpleNamespace:
    """Return what this asks of `torch.cuda`. There is no GPU here; the names are torch's."""
    return SimpleNamespace(
        is_initialized=lambda: initialised, get_device_name=lambda: name, current_device=lambda: 1
    )


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, 1), ("0,1", 1), ("4, 6", 6), ("GPU-8d3f,GPU-a01c", None), ("3", None)]
)
def test_a_process_on_a_gpu_names_it(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda = device_module("NVIDIA H200", initialised=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    hardware = read_hardware(ThroughputConfig())
    assert (hardware.device, hardware.gpu) == ("NVIDIA H200", gpu)


def test_a_process_on_an_npu_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=device_module("", initialised=False)))
    npu = device_module("Ascend910B3", initialised=True)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    assert read_hardware(ThroughputConfig()).device == "Ascend910B3"


def test_a_driver_that_does_not_answer_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("CUDA error: unknown error")

    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_name=fail)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert read_hardware(ThroughputConfig()).device is None


@pytest.mark.needs("torch")
def test_the_part_of_a_process_without_a_device_has_the_configuration_alone(tmp_path: Path) -> None:
    import torch

    config = ProfileConfig.from_mapping(
        {
            "save_path": str(tmp_path),
            "steps": [1],
            "roles": {"*": {"profiler": "off"}},
            "throughput": {"flops_per_token": 4.2e10, "device_peak_tflops": 354},
        }
    )
    torch.ones(2).sum()
    with capture(1, config=config):
        pass
    ((part,), _) = read_parts(RunLayout(tmp_path).step(1))
    assert part.hardware == Hardware(flops_per_token=4.2e10, peak_tflops=354)
