"""The part `tests`: the tests that need a GPU, and the torch backend's tests on a machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.repository import ROOT

TESTS = ROOT / "packages/core/tests"
NEED_A_GPU = ("test_cuda_memory.py",)
"""Files with tests that are skipped without a GPU."""
MEET_A_GPU = ("test_torch_backend.py", "test_torch_rollout.py")
"""Files whose tests run on all machines, and record kernels if there is a GPU."""

NO_GPU = "needs a CUDA device"
"""The reason with which tests are skipped without a GPU."""


def run(record: Record, device: Device, folder: Path) -> None:
    files = [*NEED_A_GPU, *(() if device.pretend else MEET_A_GPU)]
    report = folder / "junit.xml"
    command = [
        *(sys.executable, "-m", "pytest", *(str(TESTS / file) for file in files)),
        *("-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"),
        *(f"--junit-xml={report}", f"--basetemp={folder / 'pytest'}", "-q"),
        *("-W", "ignore:Warning:UserWarning"),  # torch 2.11: "Warning: Profiler clears events ..."
    ]
    # Plugins of other packages may warn, and a warning is an error here.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop("STEPSCOPE_RAISE")
    code = subprocess.run(command, cwd=ROOT, env=environ).returncode
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    on_device = [case for case in cases if "TestOnADevice" in str(case.get("classname"))]
    record.check("tests that failed", len(bad), 0, source="pytest", agrees=not code)
    record.figure("tests that passed", len(cases) - len(bad) - len(skipped))
    left_out = [case for case in on_device if _reason(case) == NO_GPU]
    wanted = len(on_device) if device.pretend else 0
    record.equal(
        f"of {len(on_device)} tests on a CUDA device, left out", len(left_out), wanted, source="pytest"
    )
    for case in bad:
        record.note(f"failed: {case.get('file')}::{case.get('name')}")
    for reason, number in Counter(map(_reason, skipped)).items():
        record.note(f"{number} tests skipped: {reason}")


def _reason(case: ElementTree.Element) -> str | None:
    """Return the reason why a test was skipped, or None if it ran."""
    skipped = case.find("skipped")
    return None if skipped is None else skipped.get("message")
