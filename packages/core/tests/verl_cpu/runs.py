"""Trainings of verl under `stepscope run`, and what verl and stepscope say of their steps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packages.core.tests.on_cpu.runs import CAPTURED, Step, captured_steps, stepscope_run
from packages.core.tests.verl_cpu.launch import LOGGED, run_example, train

LOGGERS = "trainer.logger=[console,file,stepscope]"
BY_VERL = (
    "global_profiler.tool=stepscope",
    "actor_rollout_ref.actor.profiler.enable=True",
    "actor_rollout_ref.actor.profiler.all_ranks=True",
)
_NUMBER = re.compile(r"(\S+?):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)")


class Training(NamedTuple):
    save_path: Path
    output: str
    metrics: dict[int, dict[str, float]]
    """Numbers that verl printed, by step."""
    logged: dict[int, dict[str, float]]
    """Numbers in the file of verl's own logger, by step."""
    steps: dict[int, Step]


def captured_training(
    folder: Path,
    *overrides: str,
    gpus: int = 1,
    configuration: Sequence[str] = ("--preset", "verl"),
    by_verl: bool = False,
    main: str = "verl.trainer.main_ppo",
) -> Training:
    """Train in `folder`, and capture two of the four steps.

    Args:
        by_verl: verl's own configuration selects the steps, through its profiler tool `stepscope`, and no
            command of stepscope starts the training.
    """
    save_path, before, selection = folder / "run", list[str](), list[str]()
    if by_verl:
        steps = ",".join(map(str, CAPTURED))
        selection = [
            *BY_VERL, f"global_profiler.steps=[{steps}]", f"global_profiler.save_path={save_path}"
        ]  # fmt: skip
    else:
        before = stepscope_run(save_path, *configuration)
    code, output = train(folder, LOGGERS, *selection, *overrides, before=before, gpus=gpus, main=main)
    assert code == 0, output[-5000:]
    return read_training(folder, save_path, output)


def example_training(folder: Path, *overrides: str) -> Training:
    """Train in `folder` with the example, which captures two of the four steps."""
    code, output = run_example(folder, LOGGERS, *overrides)
    assert code == 0, output[-5000:]
    return read_training(folder, folder / "outputs" / "verl_grpo", output)


def read_training(folder: Path, save_path: Path, output: str) -> Training:
    """Return what verl printed, and what `stepscope report` says of the captured steps."""
    metrics = printed_metrics(output)
    return Training(save_path, output, metrics, logged_numbers(folder), captured_steps(save_path, metrics))


def logged_numbers(folder: Path) -> dict[int, dict[str, float]]:
    """Return the numbers in the file of verl's logger, by step. NaN stands there as null, and is left out."""
    lines = [json.loads(line) for line in (folder / LOGGED).read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line["data"].items() if value is not None}
        for line in lines
    }


def printed_metrics(output: str) -> dict[int, dict[str, float]]:
    """Return the numbers that verl's console logger printed, by step."""
    lines = re.findall(r"step:(\d+) - (.*)", output)
    return {int(step): {name: float(value) for name, value in _NUMBER.findall(line)} for step, line in lines}
