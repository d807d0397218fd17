"""verl, unedited: its default trainer with a tool, under `stepscope run --preset verl`."""

from __future__ import annotations

import faulthandler
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packages.core.tests.verl_cpu.launch import TOOLS, train

pytest.importorskip("verl")
CAPTURED = (2, 3)


class Run(NamedTuple):
    """A training that ended."""

    folder: Path
    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers that verl printed, by step."""
    reports: dict[int, Any]
    """`stepscope report --json`, by step."""


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a training of four steps, of which two were captured."""
    faulthandler.cancel_dump_traceback_later()  # the limit of a test is less than verl takes to start
    folder = tmp_path_factory.mktemp("verl")
    options = [
        "--preset",
        "verl",
        "--steps",
        ",".join(map(str, CAPTURED)),
        "--save-path",
        str(folder / "run"),
    ]
    code, output = train(folder, *TOOLS, before=[sys.executable, "-m", "stepscope", "run", *options])
    assert code == 0, output[-5000:]
    command = [sys.executable, "-m", "stepscope", "report", str(folder / "run"), "--no-html", "--json"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    reports = {report["step"]: report for report in json.loads(printed)["steps"]}
    return Run(folder / "run", output, printed_metrics(output), reports)


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers that verl's console logger printed, by step."""
    lines = re.findall(r"step:(\d+) - (.*)", output)
    number = re.compile(r"(\S+?):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)")
    return {int(step): {name: float(value) for name, value in number.findall(line)} for step, line in lines}


def test_the_selected_steps_are_captured_and_verl_runs_to_its_end(run: Run) -> None:
    assert sorted(run.metrics) == [1, 2, 3, 4]
    assert sorted(run.reports) == list(CAPTURED)
