"""Builds DeepSpeed's operators for the CPU, with ninja and a C++ compiler: else each actor waits for that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BUILT = Path(sys.prefix) / "torch_extensions"

if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(BUILT), MAX_JOBS="2")
    from deepspeed.accelerator import get_accelerator

    for builder in ("FusedAdamBuilder", "ShareMemCommBuilder"):
        get_accelerator().create_op_builder(builder).load(verbose=False)
