"""Copies `sgl_kernel` for sglang 0.5.12 to where sglang imports it from, and the files beside this one over
it.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

here = Path(__file__).parent
there = Path(sysconfig.get_paths()["purelib"]) / "sgl_kernel"
for engine in (here.with_name("sglang-0.5.12"), here):
    shutil.copytree(engine / "sgl_kernel", there, dirs_exist_ok=True)
