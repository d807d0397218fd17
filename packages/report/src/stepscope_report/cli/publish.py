"""`stepscope publish`: gives a step's figures to stores of curves and traces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from stepscope.config import WRITERS
from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope_report.cli import screen
from stepscope_report.cli.exits import CommandError, Exit
from stepscope_report.cli.find import STEPS_HELP, find_of_run, is_step
from stepscope_report.writers.protocol import ReportWriter
from stepscope_report.writers.publish import load_writers, outcomes, publish_step


def publish(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    to: Annotated[
        str, typer.Option(metavar="NAMES", help="tensorboard, wandb, mlflow, otel: with commas between.")
    ] = "",
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Of this run, if several are there.")] = None,
) -> None:
    """Give each step's figures (stages, idle, long tail, own cost) to TensorBoard, W&B, MLflow or OTel."""
    if not to.strip(" ,"):
        raise CommandError(f"publish to what? Name it: --to {','.join(WRITERS)}, or some of these")
    os.umask(0o077)  # files of writers in the run's folder are as private as the others there
    try:
        writers = load_writers(to.split(","))
    except ConfigError as error:
        raise ConfigError("--to", error.value, error.allowed, error.fix) from None
    chosen = find_of_run(path, step, run)
    steps = chosen.steps.values()
    save_path = RunLayout(path.parent if is_step(path) else path)
    complete = [_publish(save_path, layout, chosen.run_id, writers) for layout in steps]
    raise typer.Exit(Exit.OK if all(complete) else Exit.INCOMPLETE)


def _publish(
    run: RunLayout, step: StepLayout, run_id: str | None, writers: Mapping[str, ReportWriter]
) -> bool:
    """Publish one step, print the outcomes and return whether nothing failed."""
    name = step.root.name
    try:
        figures = publish_step(run, step, run_id, writers)
    except RecordError as error:
        screen.warn(f"{name}: {error}")
        return False
    show = screen.warn if any(figures.written.values()) else screen.say
    for line in outcomes(figures):
        show(f"{name}: {line}")
    return not any(figures.written.values())
