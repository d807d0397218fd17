"""Libraries in C that stand for a device's, and programs that load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(folder: Path, name: str, source: str) -> Path:
    """Compile a shared library of that file name into `folder`, and return the folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: it stands for the library of a device")
    file = folder / f"{name}.c"
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", str(folder / name), str(file)], check=True)
    return folder


def run_with(folder: Path, code: str, *paths: Path) -> str:
    """Return the output of a program that finds the libraries of `folder`, and Python modules in `paths`."""
    modules = [str(path) for path in paths] + [path for path in sys.path if path]
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(modules)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
