"""`stepscope doctor`: tests of this machine, with a fix for each that fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from stepscope_report.cli import screen
from stepscope_report.cli.command import Exit
from stepscope_report.doctor import Row
from stepscope_report.doctor.examine import examine

LOOKS = {
    "green": ("ok", "green"),
    "amber": ("note", "yellow"),
    "red": ("FAILS", "bold red"),
    "absent": ("-", "dim"),
}
"""Word and colour of each state. The word is shown without colours too."""


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope doctor --json`."""

    format: int = 1
    rows: list[Row]


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's configuration file.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Look at the nodes of this Ray cluster too: auto.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what is installed, what will not work here, and the fix. Exit code 1 if something fails."""
    with screen.waiting("looking"):
        rows = list(examine(config, ray))
    if json:
        screen.show_json(Examined(rows=rows))
    else:
        screen.show(_table(rows), _summary(rows))
    if any(row.state == "red" for row in rows):
        raise typer.Exit(Exit.ERROR)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        word, colour = LOOKS[row.state]
        description = Text(row.found)
        if row.fix:
            description.append(f"\nfix: {row.fix}", style=colour)
        table.add_row(Text(word, style=colour), row.subject, description)
    return table


def _summary(rows: list[Row]) -> Text:
    counted = Counter(row.state for row in rows)
    return Text(
        f"\n{counted['green']} ok, {counted['amber']} to note, {counted['red']} failing, "
        f"{counted['absent']} not installed"
    )
