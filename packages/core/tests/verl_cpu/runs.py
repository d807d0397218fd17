"""Trainings of verl under `stepscope run`, and what verl and stepscope say of their steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from packages.core.tests.verl_cpu.launch import train

CAPTURED = (2, 3)
_NUMBER = re.compile(r"(\S+?):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)")
Label: TypeAlias = tuple[str, str]


class Step(NamedTuple):
    """A captured step."""

    number: int
    folder: Path
    metrics: dict[str, float]
    """Numbers that verl printed."""
    report: Any
    """`stepscope report --json`."""

    @property
    def calls(self) -> dict[Label, int]:
        """The number of calls by role and stage."""
        return {(stage["role"], stage["stage"]): stage["calls"] for stage in self.report["stages"]}

    @property
    def seconds(self) -> dict[Label, float]:
        """The sum of the calls' times by role and stage."""
        return {(stage["role"], stage["stage"]): stage["total_ns"] / 1e9 for stage in self.report["stages"]}

    @property
    def unaccounted(self) -> float:
        """The share of the step that no stage accounts for."""
        breakdown = self.report["breakdown"]
        ns = sum(line["wall_ns"] for line in breakdown["lines"] if line["kind"] == "unaccounted")
        return float(ns / breakdown["window_ns"])


class Training(NamedTuple):
    """A training that ended."""

    folder: Path
    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers that verl printed, by step."""
    steps: dict[int, Step]


def captured_training(
    folder: Path, *overrides: str, gpus: int = 1, configuration: Sequence[str] = ("--preset", "verl")
) -> Training:
    """Train in `folder`, and capture two of the four steps."""
    stepscope = [sys.executable, "-m", "stepscope"]
    save_path = folder / "run"
    options = [*configuration, "--steps", ",".join(map(str, CAPTURED)), "--save-path", str(save_path)]
    code, output = train(folder, *overrides, before=[*stepscope, "run", *options], gpus=gpus)
    assert code == 0, output[-5000:]
    command = [*stepscope, "report", str(save_path), "--no-html", "--json"]
    # 3: a part of a step is missing, which is for the tests to say
    reported = subprocess.run(command, capture_output=True, text=True)
    assert reported.returncode in (0, 3), reported.stderr
    metrics = printed_metrics(output)
    steps = {
        report["step"]: Step(
            report["step"], save_path / f"step_{report['step']:06d}", metrics[report["step"]], report
        )
        for report in json.loads(reported.stdout)["steps"]
    }
    return Training(folder, output, metrics, steps)


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers that verl's console logger printed, by step."""
    lines = re.findall(r"step:(\d+) - (.*)", output)
    return {int(step): {name: float(value) for name, value in _NUMBER.findall(line)} for step, line in lines}
