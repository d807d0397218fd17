"""`stepscope diff`: what changed between two steps, or two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.exits import Exit
from stepscope.cli.find import find_steps
from stepscope.cli.report import Reports, read_reports
from stepscope.report.tables.diff import diff as compare
from stepscope.report.terminal.diff import render_diff


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run, or of one step in it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it.")],
    run_a: Annotated[str | None, typer.Option(help="A's run, where several wrote into one folder.")] = None,
    run_b: Annotated[str | None, typer.Option(help="B's run.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON; times in ns.")] = False,
) -> None:
    """Show what changed from A to B, stage by stage. Of a run, the mean of its captured steps is compared."""
    one, other = _read(a, run_a), _read(b, run_b)
    change = compare(one.steps, other.steps)
    if json:
        screen.show_json(change)
    else:
        screen.show(render_diff(change))
    sound = change.a.complete and change.b.complete and not (one.unreadable or other.unreadable)
    raise typer.Exit(Exit.OK if sound else Exit.INCOMPLETE)


def _read(path: Path, run: str | None) -> Reports:
    reports = read_reports(find_steps(path, run=run), run)
    for step, why in reports.unreadable.items():
        screen.say(f"{step}: {why}")
    return reports
