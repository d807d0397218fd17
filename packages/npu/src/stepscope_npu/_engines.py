"""What SGLang does to torch's profiler on an NPU, by what its code says. It was not run on one."""

from __future__ import annotations

import sys


def patched_torch_profiler() -> str | None:
    """What is to be known where `torch.profiler.profile` is torch_npu's; None where it is torch's own.

    SGLang replaces it when it is imported on an NPU, and `ProfilerActivity.CPU` and `.CUDA` with it, which
    torch's own profiler does not survive: `tool: torch` is refused there. The backend here does not go
    through `torch.profiler`, and so works either way.
    """
    torch, torch_npu = sys.modules.get("torch"), sys.modules.get("torch_npu")
    if torch is None or torch_npu is None:
        return None
    profile = torch.profiler.profile
    if not str(getattr(profile, "__module__", "")).startswith("torch_npu"):
        return None
    said = "torch.profiler.profile is torch_npu's (SGLang replaces it on NPUs)"
    if not hasattr(torch_npu, "_apply_patches"):
        said += (
            ". This torch_npu has no _apply_patches, which SGLang replaces it with: its own profiler then "
            "fails at stop with AttributeError: prof_if"
        )
    return said
