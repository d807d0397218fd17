"""Build the stand-in for CANN with gcc, and make the environment of a process that uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cann.c")
NAMES = [
    "hccl",
    "ascendcl",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "msprofiler",
    "ms_tools_ext",
    "ascend_hal",
    "mspti",
]
"""Libraries that torch_npu links to (the first six) or opens."""


def build(folder: Path) -> Path:
    """Build one library in `folder`, with a link for each name. Skip the test if gcc is not installed."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is not installed (Debian: apt install gcc): torch_npu's C++ was not run")
    library = folder / "libfake_cann.so"
    command = [gcc, "-O1", "-fPIC", "-shared", "-w", "-o", str(library), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True)
    for name in NAMES:
        (folder / f"lib{name}.so").symlink_to(library.name)
    return folder


def make_home(folder: Path) -> Path:
    """Return an ASCEND_HOME_PATH with the stand-in for the tool `msprof`, which the analysis starts."""
    tool = folder / "tools" / "profiler" / "bin" / "msprof"
    tool.parent.mkdir(parents=True)
    for inner in ("runtime", "compiler", "opp", "tools/profiler/profiler_tool/analysis/msprof"):
        (folder / inner).mkdir(parents=True)
    (folder / "tools/profiler/profiler_tool/analysis/msprof/msprof.py").touch()
    script = Path(__file__).with_name("fake_msprof.py").read_text()
    tool.write_text(f"#!{sys.executable}\n{script}")
    tool.chmod(0o755)
    return folder


def environment(libraries: Path, *, home: Path | None = None, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs over the stand-in."""
    made = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": str(libraries), **more}
    if home is not None:
        made |= {
            "ASCEND_HOME_PATH": str(home),
            "ASCEND_OPP_PATH": str(home / "opp"),
            "PATH": f"{home / 'tools/profiler/bin'}:{os.environ['PATH']}",
            "FAKE_CANN_PROF": "1",
        }
    return made
