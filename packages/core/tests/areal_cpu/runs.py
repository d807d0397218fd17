"""Trainings of AReaL under `stepscope run`, and what AReaL and stepscope say of their steps."""

from __future__ import annotations

import re
from pathlib import Path

from packages.core.tests.areal_cpu.launch import train
from packages.core.tests.on_cpu.runs import Training, read_training, stepscope_run

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_STEP = re.compile(r"Train step (\d+)/\d+ done")
_NUMBER = re.compile(r"(?<=│) ([\w./-]+) +│ +(-?[\d.]+e[-+]\d+)")


def captured_training(folder: Path, *overrides: str) -> Training:
    save_path = folder / "profile"
    before = stepscope_run(save_path, "--preset", "areal", "--require-capture")
    code, output = train(folder, *overrides, before=before)
    # AReaL's launcher for one machine ends with an exception when its trainer has ended, also well
    assert code == 1, output[-5000:]
    assert "Training completes!" in output, output[-5000:]
    assert "JobState.COMPLETED" in output, output[-5000:]
    return read_training(folder, save_path, output, printed_metrics(output))


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers of AReaL's tables, by step. The line above the table of step 0 says 1."""
    _, *tables = _STEP.split(_COLOUR.sub("", output))
    return {
        int(number) - 1: {name: float(value) for name, value in _NUMBER.findall(table)}
        for number, table in zip(tables[::2], tables[1::2], strict=True)
    }
