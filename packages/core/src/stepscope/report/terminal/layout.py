"""The look of everything printed: tables and lists with a title, in plain characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.report.formatting import plain

LISTED = 12
"""Lines of a list that are printed; how many more there are is said, and `--json` has them all."""


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = ""
) -> RenderableType:
    """A titled table. A column whose name starts with `>` is of numbers: right-aligned and never broken."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        number = name.startswith(">")
        made.add_column(
            name.lstrip(">"), justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return _titled(title, made, note)


def listing(title: str, lines: Sequence[str]) -> RenderableType:
    """A titled list, cut at `LISTED` lines."""
    shown = [Text(f"- {plain(line)}") for line in lines[:LISTED]]
    if len(lines) > LISTED:
        shown.append(Text(f"- and {len(lines) - LISTED:,} more (--json has all)"))
    return _titled(title, Group(*shown), "")


def _titled(title: str, body: RenderableType, note: str) -> RenderableType:
    parts: list[RenderableType] = [
        Text(""),
        Text(title, style="bold"),
        Padding(body, (0, 0, 0, 2), expand=False),
    ]
    if note:
        parts.append(Padding(Text(note, style="dim"), (0, 0, 0, 2), expand=False))
    return Group(*parts)
