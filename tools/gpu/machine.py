"""The part `machine`: the GPU, its driver and torch, and a check that torch computes on the GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.gpu.smi import number, query


def run(record: Record, device: Device, folder: Path) -> None:
    record.figure("python", platform.python_version())
    record.figure("torch", torch.__version__)
    record.figure("CUDA of torch", torch.version.cuda)
    record.figure("CPUs", os.cpu_count())
    record.figure("system", platform.platform())
    _product(record, device)
    smi = device.smi()
    if smi is None:
        record.check("the GPU", device.name, "nvidia-smi is not there", source="nvidia-smi", agrees=False)
        return
    rows = query(smi, ["index", "uuid", "name", "driver_version", "memory.total"])
    row = next((row for row in rows if row["uuid"].endswith(uuid(device))), rows[0])
    record.figure("driver", row["driver_version"])
    record.figure("GPUs of nvidia-smi", len(rows))
    if device.pretend:
        return
    properties = torch.cuda.get_device_properties(0)
    record.figure("capability", f"{properties.major}.{properties.minor}")
    record.equal("name of the GPU", properties.name, row["name"], source="nvidia-smi")
    total_mib = number(row["memory.total"]) or 0.0
    record.near(
        "memory of the GPU",
        properties.total_memory / (1 << 20),
        total_mib,
        unit="MiB",
        source="nvidia-smi",
        within=0.03,  # the driver reserves some memory
    )


def _product(record: Record, device: Device) -> None:
    """Compare a matrix product in bf16 on the device with the product in float64 on the CPU."""
    torch.manual_seed(0)
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    exact = left.bfloat16().double() @ right.bfloat16().double()
    product = (left.bfloat16().to(device.torch) @ right.bfloat16().to(device.torch)).cpu().double()
    error = ((product - exact).abs().max() / exact.abs().max()).item()
    record.check(
        "largest error of a product in bf16",
        f"{error:.4f}",
        "at most 0.01",
        source="the product in float64 on the CPU",
        agrees=error <= 0.01,
    )


def uuid(device: Device) -> str:
    """Return the UUID of the GPU without the prefix `GPU-`, or "" if torch does not know it."""
    if device.pretend:
        return ""
    return str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
