"""The part `tests`: tests that skip themselves without a GPU, and the torch backend's tests beside one."""

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
"""Files with tests that skip themselves without a GPU."""
MEET_A_GPU = ("test_torch_backend.py", "test_torch_rollout.py")
"""Files whose tests run everywhere, and record kernels on a GPU."""


def run(record: Record, device: Device, folder: Path) -> None:
    files = [*NEED_A_GPU, *(() if device.pretend else MEET_A_GPU)]
    report = folder / "junit.xml"
    command = [
        *(sys.executable, "-m", "pytest", *(str(TESTS / file) for file in files)),
        *("-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"),
        *(f"--junit-xml={report}", f"--basetemp={folder / 'pytest'}", "-q"),
    ]
    # Plugins of other packages on the machine would warn, and a warning is an error here.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop("STEPSCOPE_RAISE")
    code = subprocess.run(command, cwd=ROOT, env=environ).returncode
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    on_device = [case for case in cases if "TestOnADevice" in str(case.get("classname"))]
    record.check("tests that failed", len(bad), 0, source="pytest", agrees=not code)
    record.figure("tests that passed", len(cases) - len(bad) - len(skipped))
    ran = sum(case.find("skipped") is None for case in on_device)
    wanted = 0 if device.pretend else len(on_device)
    record.equal("tests on a CUDA device that ran", ran, wanted, source="pytest")
    for case in bad:
        record.note(f"failed: {case.get('file')}::{case.get('name')}")
    reasons = Counter(str(getattr(case.find("skipped"), "attrib", {}).get("message")) for case in skipped)
    for reason, number in reasons.items():
        record.note(f"{number} tests skipped: {reason}")
