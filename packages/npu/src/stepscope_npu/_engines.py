"""What SGLang does to torch's profiler on an NPU, and what that costs SGLang itself."""

from __future__ import annotations

import sys


def sglang_profiler() -> str | None:
    """What is to be known where SGLang has touched torch's profiler, or could not; None elsewhere.

    Imported on an NPU, SGLang sets torch_npu's `profile` in the place of `torch.profiler.profile`, and
    torch_npu's activities in that of `ProfilerActivity.CPU` and `.CUDA`, which torch's own profiler does not
    survive: `tool: torch` is refused there. The backend here does not go through `torch.profiler`, and so
    works either way.
    """
    torch, torch_npu = sys.modules.get("torch"), sys.modules.get("torch_npu")
    if torch is None or torch_npu is None:
        return None
    if str(getattr(torch.profiler.profile, "__module__", "")).startswith("torch_npu"):
        return "torch.profiler.profile is torch_npu's (SGLang replaces it on NPUs)"
    if "sglang" in sys.modules and not hasattr(torch_npu, "_apply_patches"):
        return (
            "this torch_npu has no _apply_patches, with which SGLang replaces torch.profiler.profile: "
            "its own profiler runs torch's, and fails at its stop with AttributeError: prof_if. Fix: "
            "record with tool: npu"
        )
    return None
