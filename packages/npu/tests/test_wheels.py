"""The backend on the real Python code of torch_npu wheels, which are unpacked and never installed.

Installing one breaks `import torch` on a machine without CANN. Version numbers do not order the features of
torch_npu (a `.postN` carries back-ports); by what they have, wheels fall into four families.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.downloads import wheel
from tests.tree import ROOT

WHEELS = {
    "2.1.0.post8": "A",  # neither `mstx` nor its domains
    "2.4.0": "A",
    "2.5.1.post1": "B",  # domains, and host data of the system
    "2.6.0": "B",
    "2.1.0.post17": "C",  # `mstx`
    "2.10.0": "C",  # with other defaults than the rest of its family
    "2.7.1.post11": "D",  # a marker for each step, trace ids, inert under msprof
    "2.13.0": "D",
    "2.14.0": "D",
}
"""{version: family}"""
FILES = Path(__file__).parent / "on_a_wheel"
PLUGIN = "packages.npu.tests.on_a_wheel.fixtures"
# Python code alone is read, so that any Python may fetch the wheels of this one.
OF_LINUX = [
    word
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
    for word in ("--platform", tag)
]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("version", WHEELS)
def test_the_backend_keeps_its_contract_on(version: str) -> None:
    folder = wheel(f"torch-npu=={version}", "--python-version", "3.11", *OF_LINUX)
    env = {
        **os.environ,
        "TORCH_NPU_WHEEL": str(folder),
        "TORCH_NPU_FAMILY": WHEELS[version],
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    files = [str(FILES / name) for name in ("conformance.py", "behaviour.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
