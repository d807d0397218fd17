"""Tests of the backend on the Python code of torch_npu wheels, which are unpacked and never installed.

An installed torch_npu breaks `import torch` on a machine without CANN. The wheels fall into four families by
their features. Version numbers do not tell the family, because a `.postN` contains backports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
    "2.10.0": "C",  # other defaults than the rest of the family
    "2.7.1.post11": "D",  # a marker for each step, trace ids, inert under msprof
    "2.13.0": "D",
    "2.14.0": "D",
}
"""{version: family}"""
FILES = Path(__file__).parent / "on_a_wheel"
PLUGIN = "packages.npu.tests.on_a_wheel.fixtures"
# Only Python code of the wheels runs, so any Python version may fetch them.
OF_LINUX = [
    word
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
    for word in ("--platform", tag)
]


SERVER = """
import gc, json, os, signal, sys
import torch, torch._inductor.config, torch.profiler, pytest  # the seconds that every wheel would pay

gc.freeze()  # a child that exits would walk, and so copy, every page of torch's objects: a second
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(280)
        for stream in (1, 2):
            os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ.update(job["environment"])
        sys.exit(pytest.main(job["arguments"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Program that forks a process for each wheel. torch is imported once, and torch_npu only in the forks."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield server


@pytest.mark.needs("torch")
@pytest.mark.parametrize("version", WHEELS)
def test_the_backend_keeps_its_contract_on(
    version: str, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = wheel(f"torch-npu=={version}", "--python-version", "3.11", *OF_LINUX)
    output = tmp_path / "output"
    files = [str(FILES / name) for name in ("conformance.py", "behaviour.py")]
    job = {
        "environment": {"TORCH_NPU_WHEEL": str(folder), "TORCH_NPU_FAMILY": WHEELS[version]},
        "arguments": ["-q", "-p", PLUGIN, "-p", "no:cacheprovider", *files],
        "output": str(output),
    }
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(job), file=server.stdin, flush=True)
    assert int(server.stdout.readline()) == 0, output.read_text()[-10000:]
