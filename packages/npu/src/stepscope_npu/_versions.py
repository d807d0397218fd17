"""What the installed torch_npu is and can do: asked of its own signatures, never of its version number.

Wheels named `X.Y.Z.postN` carry back-ports, so that 2.1.0.post17 has what 2.4.0 lacks.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stepscope.config import INSTALL_TORCH_NPU
from stepscope.errors import BackendError

MSPROF_VARIABLES = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")
"""Set where `msprof` runs the process: it owns the device's profiler then, and torch_npu's is inert."""
SOURCE_CANN = "source CANN's set_env.sh (often /usr/local/Ascend/ascend-toolkit/set_env.sh)"


@dataclass(frozen=True, kw_only=True)
class TorchNpu:
    """An imported torch_npu."""

    module: Any
    profiler: Any
    """`torch_npu.profiler`"""
    interface: ModuleType
    """`torch_npu.profiler.profiler_interface`, where every recording, anybody's, meets the C++ profiler."""
    mstx: Any
    arguments: frozenset[str]
    """Of `_ExperimentalConfig`."""
    versions: dict[str, str]

    @property
    def version(self) -> str:
        return self.versions["torch_npu"]

    def choices(self, of: str) -> dict[str, Any]:
        """The constants of `ProfilerLevel`, `AiCMetrics` or `ExportType`, by name."""
        return {name: value for name, value in vars(getattr(self.profiler, of)).items() if name[0] != "_"}


def load() -> TorchNpu:
    """Imports torch_npu.

    Raises:
        BackendError: it is not installed, does not import, finds no NPU, or msprof has this process.
    """
    try:
        import torch
        import torch_npu
        from torch_npu.npu import mstx
        from torch_npu.profiler import profiler_interface
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            raise BackendError(
                f"tool is npu, and torch_npu is not installed here. Fix: {INSTALL_TORCH_NPU}"
            ) from None
        raise BackendError(f"torch_npu does not import: {error}. Fix: pip install {error.name}") from error
    except Exception as error:  # what a broken CANN raises is not always an ImportError
        raise BackendError(f"torch_npu does not import: {error}. Fix: {SOURCE_CANN}") from error
    if not torch_npu.npu.is_available():
        raise BackendError(
            f"tool is npu, and torch_npu {torch_npu.__version__} finds no NPU in this process. Fix: check "
            "npu-smi info and ASCEND_RT_VISIBLE_DEVICES, or tool: torch"
        )
    refuse_msprof()
    return TorchNpu(
        module=torch_npu,
        profiler=torch_npu.profiler,
        interface=profiler_interface,
        mstx=mstx,
        arguments=frozenset(inspect.signature(torch_npu.profiler._ExperimentalConfig).parameters),
        versions={"torch_npu": str(torch_npu.__version__), "torch": str(torch.__version__)},
    )


def refuse_msprof() -> None:
    """
    Raises:
        BackendError: this process is profiled by msprof.
    """
    found = [name for name in MSPROF_VARIABLES if os.environ.get(name)]
    if found:
        raise BackendError(
            f"{' and '.join(found)} is set: msprof profiles this process, and torch_npu's profiler then "
            f"records nothing. Fix: unset {' '.join(found)}, or run without msprof"
        )
