"""`stepscope report`: where each captured step went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import find_steps
from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope.report import StepReport, report_step
from stepscope.report.text import render, render_overview
from stepscope.timeline import load_step, span_bytes


class Reports(msgspec.Struct, frozen=True, kw_only=True):
    """What `stepscope report --json` prints."""

    format: int = 1
    steps: list[StepReport]
    unreadable: dict[str, str]
    """Folders of steps that nothing could be made of, and why."""


def report(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_STEP", help="Folder of a run, or of one step in it.")
    ],
    step: Annotated[int | None, typer.Option(help="Only this step of the run.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's id, where several wrote into one folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The tables as JSON; times in ns.")] = False,
) -> None:
    """Where each captured step went: tables by role and stage, ranks, long tail, and what is missing."""
    reports = read_reports(find_steps(path, step, run), run)
    if json:
        screen.show_json(reports)
    else:
        show_reports(reports)
    complete = all(found.health.complete for found in reports.steps)
    raise typer.Exit(Exit.OK if complete and not reports.unreadable else Exit.INCOMPLETE)


def read_reports(steps: list[StepLayout], run: str | None = None) -> Reports:
    """The reports of these steps. A bar shows how far the reading is.

    Raises:
        CommandError: nothing could be made of any of them.
    """
    with screen.progress("reading spans", sum(span_bytes(step.root) for step in steps)) as done:
        read = {step.root.name: _read(step, run, done) for step in steps}
    reports = [found for found in read.values() if isinstance(found, StepReport)]
    unreadable = {name: found for name, found in read.items() if isinstance(found, str)}
    if not reports:
        raise CommandError("\n".join(unreadable.values()), Exit.ERROR)
    return Reports(steps=reports, unreadable=unreadable)


def _read(step: StepLayout, run: str | None, done: Callable[[int], None]) -> StepReport | str:
    try:
        return report_step(load_step(step.root, run_id=run, on_read=done))
    except RecordError as error:
        return str(error)


def show_reports(reports: Reports) -> None:
    """All tables; of several steps also one with a line for each."""
    screen.show(*(render(found) for found in reports.steps))
    if len(reports.steps) > 1:
        screen.show(render_overview(reports.steps))
    for step, why in reports.unreadable.items():
        screen.say(f"{step}: {why}")
