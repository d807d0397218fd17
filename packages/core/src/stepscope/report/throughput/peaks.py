"""Peak FLOP/s of devices, by the names that torch gives them: dense, in BF16 or FP16, from data sheets.

Data sheets print the figure with sparsity, which is twice the dense one. Where they do, it is halved here.
"""

from __future__ import annotations

_TFLOPS = {
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
    # nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    # resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet: 1,979, 1,513 and 1,671
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    # resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    # nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703: 4,500
    "NVIDIA B200": 2250.0,
    # resources.nvidia.com/en-us-l40s/l40s-datasheet-28413: 362.05, and 733 with sparsity
    "NVIDIA L40S": 362.05,
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "AMD Instinct MI300X": 1307.4,
}
"""No data sheet of Huawei's was found for Ascend 910B; others name 256 to 376. So none stands here."""


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device. None: unknown. A slice of one (MIG) has another name, and no peak."""
    return _TFLOPS.get(device)
