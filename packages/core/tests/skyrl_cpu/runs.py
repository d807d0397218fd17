"""Trainings of SkyRL under `stepscope run`, and what SkyRL and stepscope say of their steps."""

from __future__ import annotations

import re
from pathlib import Path

from packages.core.tests.on_cpu.runs import Training, read_training, stepscope_run
from packages.core.tests.skyrl_cpu.launch import train

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"'([\w./]+)': '?(-?[\d.]+(?:e[-+]\d+)?)")


def captured_training(folder: Path, *overrides: str) -> Training:
    save_path = folder / "profile"
    before = stepscope_run(save_path, "--preset", "skyrl", "--require-capture")
    code, output = train(folder, *overrides, before=before)
    assert code == 0, output[-5000:]
    return read_training(folder, save_path, output, printed_metrics(output))


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
