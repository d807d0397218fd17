"""Trainings of OpenRLHF under `stepscope run`, and what OpenRLHF and stepscope say of their steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from packages.core.tests.openrlhf_cpu.launch import HERE, TOOL_CALLS, train
from packages.core.tests.verl_cpu.runs import Step

CAPTURED = (2, 3)
REWARDED = ("--reward.remote_url", str(HERE / "reward.py"))
"""One turn, whose reward is a function."""
MULTI_TURN = ("--train.agent_func_path", str(HERE / "agent.py"))
"""Agents of three turns, with a tool after each."""
_NUMBER = re.compile(r"'([\w./]+)': (-?[\d.]+(?:e[-+]\d+)?)")


class ToolCall(NamedTuple):
    """A call of the agent's tool, by the agent's own clock."""

    begun_ns: int
    ended_ns: int


class Training(NamedTuple):
    """A training that ended."""

    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers of OpenRLHF's lines `Global step`, by step."""
    steps: dict[int, Step]
    """The captured steps."""
    tool_calls: list[ToolCall]
    """Calls of all steps."""

    def tools(self, step: Step) -> list[ToolCall]:
        """Return the calls within a step."""
        breakdown, opened_ns = step.report["breakdown"], int(step.report["opened_ns"])
        end_ns = opened_ns + breakdown["opening_ns"] + breakdown["window_ns"]
        return [call for call in self.tool_calls if opened_ns <= call.begun_ns <= end_ns]


def captured_training(folder: Path, *options: str) -> Training:
    """Train in `folder`, and capture two of the four steps."""
    save_path = folder / "profile"
    run = [sys.executable, "-m", "stepscope", "run", "--preset", "openrlhf", "--require-capture"]
    selected = ["--steps", ",".join(map(str, CAPTURED)), "--save-path", str(save_path)]
    code, output = train(folder, *options, before=[*run, *selected])
    assert code == 0, output[-5000:]
    command = [sys.executable, "-m", "stepscope", "report", str(save_path), "--no-html", "--json"]
    # 3: a part of a step is missing, which is for the tests to say
    reported = subprocess.run(command, capture_output=True, text=True)
    assert reported.returncode in (0, 3), reported.stderr
    lines = re.findall(r"Global step (\d+): \{(.*)\}", output)
    metrics = {
        int(step): {name: float(value) for name, value in _NUMBER.findall(line)} for step, line in lines
    }
    reports = {report["step"]: report for report in json.loads(reported.stdout)["steps"]}
    log = folder / TOOL_CALLS
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Training(
        output,
        metrics,
        {
            number: Step(number, save_path / f"step_{number:06d}", metrics[number], report)
            for number, report in reports.items()
        },
        [ToolCall(**call) for call in calls],
    )
