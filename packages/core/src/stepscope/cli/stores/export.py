"""`stepscope export`: writes a report's tables as files for data frames and SQL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import STEPS_HELP, find_steps, is_step
from stepscope.cli.stores.parquet import Written, load_pyarrow, write_tables
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.report.formatting import count, size
from stepscope.report.opened.runs import OpenStep


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    parquet: Annotated[bool, typer.Option("--parquet", help="As Parquet, the only format.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write. [default: RUN_OR_STEP/tables]"),
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Of this run, if several are there.")] = None,
) -> None:
    """Write each table of `stepscope.open` as a file: of a run, with the rows of all steps."""
    if not parquet:
        raise CommandError("export as what? Name the format: --parquet")
    arrow = load_pyarrow()
    os.umask(0o077)  # the files are as private as the step's
    layouts = find_steps(path, step, run)
    steps = (OpenStep(layout.root, run=run) for layout in layouts)  # read one after the other
    numbered = not is_step(path)
    target = output or (RunLayout(path).tables if numbered else StepLayout(path).tables)
    with screen.waiting(f"writing tables to {target}"):
        written = write_tables(arrow, target, steps, numbered=numbered)
    _show(target, written)
    raise typer.Exit(Exit.INCOMPLETE if written.unreadable or written.left_out else Exit.OK)


def _show(target: Path, written: Written) -> None:
    for name, rows in written.rows.items():
        file = target / f"{name}.parquet"
        screen.say(f"{file}: {count(rows, 'row')}, {size(file.stat().st_size)}")
    for name, reason in written.left_out.items():
        screen.warn(f"table {name} is left out: {reason}")
    for name, reason in written.unreadable.items():
        screen.warn(f"{name}: {reason}")
