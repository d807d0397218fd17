"""`stepscope publish`: gives a step's figures to stores of curves and traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import find_steps, is_step
from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.scalars import StepScalars, write_scalars
from stepscope.report import report_step, to_scalars
from stepscope.timeline import load_step
from stepscope.writers.installed import load_writer
from stepscope.writers.protocol import ReportedStep, ReportWriter


def publish(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    to: Annotated[
        str, typer.Option(metavar="NAMES", help="tensorboard, wandb, mlflow, otel: with commas between.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Only this step of a run.")] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Of this run, if several are there.")] = None,
) -> None:
    """Give each step's figures (stages, idle, long tail, own cost) to TensorBoard, W&B, MLflow or OTel."""
    os.umask(0o077)  # what writers leave in the run's folder is the user's own, as everything there
    names = [name.strip() for name in to.split(",") if name.strip()]
    try:
        writers = {name: load_writer(name) for name in names}
    except ConfigError as error:
        raise CommandError(str(error)) from None
    steps = find_steps(path, step, run)
    save_path = steps[0].root.parent if is_step(path) else path
    failed = 0
    for layout in steps:
        failed += _publish(RunLayout(save_path), layout, run, writers)
    raise typer.Exit(Exit.INCOMPLETE if failed else Exit.OK)


def _publish(run: RunLayout, step: StepLayout, run_id: str | None, writers: dict[str, ReportWriter]) -> int:
    """How much failed."""
    name = step.root.name
    try:
        timeline = load_step(step.root, run_id=run_id)
    except RecordError as error:
        screen.say(f"{name}: {error}")
        return 1
    report = report_step(timeline)
    values = to_scalars(report)
    reported = ReportedStep(run=run, report=report, timeline=timeline, scalars=values)
    written = {writer: _write(on_report, reported) for writer, on_report in writers.items()}
    found = StepScalars(
        run_id=report.run_id, step=report.step, opened_ns=report.opened_ns, values=values, written=written
    )
    write_scalars(step, found)
    for writer, why in written.items():
        screen.say(f"{name}: {writer}: {why or f'{len(values)} figures'}")
    return sum(why is not None for why in written.values())


def _write(on_report: ReportWriter, reported: ReportedStep) -> str | None:
    try:
        on_report(reported)
    except Exception as error:  # theirs: one store that is away keeps the others from nothing
        return f"{type(error).__name__}: {error}"[:500]
    return None
