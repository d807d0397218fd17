"""Copies the folder `sgl_kernel` beside this file to where sglang 0.5.12 and older import it from."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

here = Path(__file__).parent / "sgl_kernel"
there = Path(sysconfig.get_paths()["purelib"]) / "sgl_kernel"
shutil.copytree(here, there, dirs_exist_ok=True)
