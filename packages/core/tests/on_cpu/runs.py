"""Trainings under `stepscope run`, and what stepscope says of their steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from packages.core.tests.on_cpu.launch import TOOL_CALLS

CAPTURED = (2, 3)
Label: TypeAlias = tuple[str, str]


class Step(NamedTuple):
    number: int
    folder: Path
    metrics: dict[str, float]
    """Numbers that the framework printed."""
    report: Any
    """`stepscope report --json`."""

    @property
    def calls(self) -> dict[Label, int]:
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


class StepsOfATraining:
    """Tests of captured steps of any training. The fixture `step` is of the file that derives from this."""

    def test_nothing_is_missing_in_the_manifest(self, step: Step) -> None:
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])

    def test_less_than_a_twentieth_of_a_step_is_unaccounted(self, step: Step) -> None:
        assert step.unaccounted < 0.05


class ToolCall(NamedTuple):
    """A call of an agent's tool, by the tool's own clock."""

    begun_ns: int
    ended_ns: int
    number: int = 0
    """The prompt's."""


class Training(NamedTuple):
    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers that the framework printed, by step."""
    steps: dict[int, Step]
    """The captured steps."""
    tool_calls: list[ToolCall]
    """Calls of all steps."""

    def tools(self, step: Step) -> list[ToolCall]:
        opened_ns = int(step.report["opened_ns"])  # behind the capture's opening
        end_ns = opened_ns + step.report["breakdown"]["window_ns"]
        return [call for call in self.tool_calls if opened_ns <= call.begun_ns <= end_ns]


def stepscope_run(save_path: Path, *options: str, steps: Sequence[int] = CAPTURED) -> list[str]:
    """Return the command that goes in front of a training's, and captures these steps."""
    selected = ["--steps", ",".join(map(str, steps)), "--save-path", str(save_path)]
    return [sys.executable, "-m", "stepscope", "run", *options, *selected]


def captured_steps(save_path: Path, metrics: Mapping[int, dict[str, float]]) -> dict[int, Step]:
    command = [sys.executable, "-m", "stepscope", "report", str(save_path), "--no-html", "--json"]
    # 3: a part of a step is missing, which is for the tests to say
    reported = subprocess.run(command, capture_output=True, text=True)
    assert reported.returncode in (0, 3), reported.stderr
    reports = {report["step"]: report for report in json.loads(reported.stdout)["steps"]}
    return {
        number: Step(number, save_path / f"step_{number:06d}", metrics[number], report)
        for number, report in reports.items()
    }


def read_training(
    folder: Path, save_path: Path, output: str, metrics: dict[int, dict[str, float]]
) -> Training:
    log = folder / TOOL_CALLS
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = captured_steps(save_path, metrics)
    return Training(output, metrics, steps, [ToolCall(**call) for call in calls])
