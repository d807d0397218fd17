"""Categories of device tasks in an Ascend recording."""

from __future__ import annotations


def layer_category(task_type: object) -> str | None:
    """Return the category of a device task, or None for a task that does no work (an event, a wait)."""
    kind = str(task_type).upper()
    if any(word in kind for word in ("MEMCPY", "SDMA", "PCIE_DMA")):
        return "gpu_memcpy"
    # Older files call some computing tasks "Other" (seen in a published one).
    if kind == "OTHER" or any(word in kind for word in ("AI_", "AIC", "AIV", "MIX", "FFTS", "DSA", "KERNEL")):
        return "kernel"
    if any(word in kind for word in ("HCCL", "COMMUNICATION", "HCCS", "RDMA")):
        return "communication"
    return None
