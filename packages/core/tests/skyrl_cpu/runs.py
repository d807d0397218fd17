"""Trainings of SkyRL under `stepscope run`, and what SkyRL and stepscope say of their steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from packages.core.tests.skyrl_cpu.launch import TOOL_CALLS, train
from packages.core.tests.verl_cpu.runs import Step

CAPTURED = (2, 3)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"'([\w./]+)': '?(-?[\d.]+(?:e[-+]\d+)?)")


class ToolCall(NamedTuple):
    """A call of the environment's tool, by its own clock."""

    number: int
    """The prompt's."""
    begun_ns: int
    ended_ns: int


class Training(NamedTuple):
    """A training that ended."""

    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers of SkyRL's console logger, by step."""
    steps: dict[int, Step]
    """The captured steps."""
    tool_calls: list[ToolCall]
    """Calls of all steps."""

    def tools(self, step: Step) -> list[ToolCall]:
        """Return the calls within a step."""
        opened_ns = int(step.report["opened_ns"])
        end_ns = opened_ns + step.report["breakdown"]["window_ns"]
        return [call for call in self.tool_calls if opened_ns <= call.begun_ns <= end_ns]


def captured_training(folder: Path, *overrides: str) -> Training:
    """Train in `folder`, and capture two of the four steps."""
    save_path = folder / "profile"
    run = [sys.executable, "-m", "stepscope", "run", "--preset", "skyrl", "--require-capture"]
    selected = ["--steps", ",".join(map(str, CAPTURED)), "--save-path", str(save_path)]
    code, output = train(folder, *overrides, before=[*run, *selected])
    assert code == 0, output[-5000:]
    return read_training(folder, save_path, output)


def read_training(folder: Path, save_path: Path, output: str) -> Training:
    """Return what SkyRL printed, and what `stepscope report` says of the captured steps."""
    command = [sys.executable, "-m", "stepscope", "report", str(save_path), "--no-html", "--json"]
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
    calls = [json.loads(line) for line in (folder / TOOL_CALLS).read_text().splitlines()]
    return Training(output, metrics, steps, [ToolCall(**call) for call in calls])


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers that SkyRL's console logger printed, by step. Each stands in a line of its own."""
    metrics: dict[int, dict[str, float]] = {}
    numbers: dict[str, float] = {}
    for line in _COLOUR.sub("", output).splitlines():
        begun = re.search(r"tracking:log:\d+.* - Step (\d+):", line)
        if begun is not None:
            numbers = metrics.setdefault(int(begun[1]), {})
        numbers |= {name: float(value) for name, value in _NUMBER.findall(line)}
    return metrics
