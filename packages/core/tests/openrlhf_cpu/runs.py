"""Trainings of OpenRLHF under `stepscope run`, and what OpenRLHF and stepscope say of their steps."""

from __future__ import annotations

import re
from pathlib import Path

from packages.core.tests.on_cpu.runs import Training, read_training, stepscope_run
from packages.core.tests.openrlhf_cpu.launch import HERE, train

REWARDED = ("--reward.remote_url", str(HERE / "reward.py"))
"""One turn, whose reward is a function."""
MULTI_TURN = ("--train.agent_func_path", str(HERE / "agent.py"))
"""Agents of three turns, with a tool after each."""
_NUMBER = re.compile(r"'([\w./]+)': (-?[\d.]+(?:e[-+]\d+)?)")


def captured_training(folder: Path, *options: str) -> Training:
    save_path = folder / "profile"
    before = stepscope_run(save_path, "--preset", "openrlhf", "--require-capture")
    code, output = train(folder, *options, before=before)
    assert code == 0, output[-5000:]
    return read_training(folder, save_path, output, printed_metrics(output))


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers of OpenRLHF's lines `Global step`, by step."""
    lines = re.findall(r"Global step (\d+): \{(.*)\}", output)
    return {int(step): {name: float(value) for name, value in _NUMBER.findall(line)} for step, line in lines}
