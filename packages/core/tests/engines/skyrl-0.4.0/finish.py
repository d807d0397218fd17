"""Installs SkyRL, which asks for Python 3.12 and runs on 3.11: `tests/skyrl_cpu` has what it lacks there."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    options = ["--no-deps", "--ignore-requires-python", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "skyrl==0.4.0"], check=True)
