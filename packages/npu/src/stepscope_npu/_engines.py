"""Changes that SGLang makes to torch's profiler on an NPU, and their consequences for SGLang."""

from __future__ import annotations

import sys


def sglang_profiler() -> str | None:
    """Describe SGLang's change of torch's profiler in this process, or its failure; None if there is none.

    On an NPU, the import of SGLang replaces `torch.profiler.profile` by torch_npu's, and
    `ProfilerActivity.CPU` and `.CUDA` by torch_npu's activities. That breaks torch's own profiler, so
    `tool: torch` is refused there. The npu backend does not use `torch.profiler` and works either way.
    """
    torch, torch_npu = sys.modules.get("torch"), sys.modules.get("torch_npu")
    if torch is None or torch_npu is None:
        return None
    if str(getattr(torch.profiler.profile, "__module__", "")).startswith("torch_npu"):
        return "torch.profiler.profile is torch_npu's (SGLang replaces it on NPUs)"
    if "sglang" in sys.modules and not hasattr(torch_npu, "_apply_patches"):
        return (
            "this torch_npu has no _apply_patches, with which SGLang replaces torch.profiler.profile: "
            "SGLang's profiler runs torch's, and fails at its stop with AttributeError: prof_if. Fix: "
            "record with tool: npu"
        )
    return None
