"""Features of the installed torch_npu, found by its signatures and never by its version number.

Wheels named `X.Y.Z.postN` contain backports: 2.1.0.post17 has features that 2.4.0 lacks.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stepscope.config import INSTALL_TORCH_NPU
from stepscope.errors import BackendError, ours

MSPROF_VARIABLES = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")
"""Variables that `msprof` sets for its process. msprof then owns the device's profiler, and the profiler of
torch_npu does nothing."""
SOURCE_CANN = "source CANN's set_env.sh (often /usr/local/Ascend/ascend-toolkit/set_env.sh)"


@dataclass(frozen=True, kw_only=True)
class TorchNpu:
    """An imported torch_npu."""

    module: Any
    profiler: Any
    """`torch_npu.profiler`"""
    interface: ModuleType
    """`torch_npu.profiler.profiler_interface`, through which all recordings call the C++ profiler."""
    mstx: Any
    arguments: frozenset[str]
    """The arguments of `_ExperimentalConfig`."""
    versions: dict[str, str]

    @property
    def version(self) -> str:
        return self.versions["torch_npu"]

    def choices(self, of: str) -> dict[str, Any]:
        """Return the constants of `ProfilerLevel`, `AiCMetrics` or `ExportType`, by name."""
        return {name: value for name, value in vars(getattr(self.profiler, of)).items() if name[0] != "_"}


def load() -> TorchNpu:
    """Import torch_npu.

    Raises:
        BackendError: torch_npu is not installed, cannot be imported, or finds no NPU; or msprof profiles this
            process.
    """
    try:
        import torch
        import torch_npu
        from torch_npu.npu import mstx
        from torch_npu.profiler import profiler_interface
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            raise BackendError(
                f"tool is npu, but torch_npu is not installed here. Fix: {INSTALL_TORCH_NPU}"
            ) from None
        raise BackendError(f"torch_npu does not import: {error}. Fix: pip install {error.name}") from error
    except ours() as error:  # a broken CANN does not always raise an ImportError
        raise BackendError(f"torch_npu does not import: {error}. Fix: {SOURCE_CANN}") from error
    if not torch_npu.npu.is_available():
        raise BackendError(
            f"tool is npu, but torch_npu {torch_npu.__version__} finds no NPU in this process. Fix: check "
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
    """Raise `BackendError` if msprof profiles this process."""
    present = [name for name in MSPROF_VARIABLES if os.environ.get(name)]
    if present:
        raise BackendError(
            f"{' and '.join(present)} is set: msprof profiles this process, and torch_npu's profiler then "
            f"records nothing. Fix: unset {' '.join(present)}, or run without msprof"
        )
