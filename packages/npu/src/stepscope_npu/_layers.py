"""What the layers of an Ascend recording are called in a timeline."""

from __future__ import annotations


def layer_category(task_type: object) -> str | None:
    """The category of a task on the device; None for one that computes and copies nothing (events, waits)."""
    said = str(task_type).upper()
    if any(word in said for word in ("MEMCPY", "SDMA", "PCIE_DMA")):
        return "gpu_memcpy"
    # Older files say "Other" of what they count as computing (seen in a published one).
    if said == "OTHER" or any(word in said for word in ("AI_", "AIC", "AIV", "MIX", "FFTS", "DSA", "KERNEL")):
        return "kernel"
    if any(word in said for word in ("HCCL", "COMMUNICATION", "HCCS", "RDMA")):
        return "communication"
    return None
