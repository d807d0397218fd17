"""Tables and lists with a title, in plain characters, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.report.blocks.block import Block, Listing, Paragraph, Remarks, TextTable
from stepscope.report.formatting import LISTED, count, plain

ROWS = 2 * LISTED
"""Rows that are printed of a table that may be cut."""


def draw(block: Block) -> RenderableType:
    """Return a block as the terminal shows it."""
    if isinstance(block, TextTable):
        return _cut_table(block)
    if isinstance(block, Listing):
        return listing(block.title, block.lines)
    if isinstance(block, Remarks):
        return _remarks(block)
    return _paragraph(block)


def _cut_table(block: TextTable) -> RenderableType:
    if not block.noun or len(block.rows) <= ROWS:
        return table(block.title, block.columns, block.rows, block.note)
    more = f"{count(len(block.rows) - ROWS, block.noun)} more in --json."
    return table(block.title, block.columns, block.rows[:ROWS], f"{more} {block.note}".rstrip())


def _paragraph(block: Paragraph) -> RenderableType:
    return Text(f"\n{plain(block.text)}")


def _remarks(block: Remarks) -> RenderableType:
    parts: list[RenderableType] = [Text(""), Text(plain(block.title), style="bold")]
    for remark in block.remarks:
        parts.append(Padding(Text(plain(remark.text)), (0, 0, 0, 2)))
        details = "\n".join(map(plain, remark.details))
        parts.append(Padding(Text(details, style="dim"), (0, 0, 0, 4)))
    return Group(*parts)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = ""
) -> RenderableType:
    """Return a titled table. A column whose name starts with `>` is of numbers: right-aligned, unbroken."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        number = name.startswith(">")
        heading = Text(plain(name.lstrip(">")))
        grid.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(plain(cell)) for cell in row))
    return _titled(title, grid, note)


def listing(title: str, lines: Sequence[str]) -> RenderableType:
    """Return a titled list, cut at `LISTED` lines."""
    shown = [Text(f"- {plain(line)}") for line in lines[:LISTED]]
    if len(lines) > LISTED:
        shown.append(Text(f"- and {len(lines) - LISTED:,} more (--json has all)"))
    return _titled(title, Group(*shown), "")


def _titled(title: str, body: RenderableType, note: str) -> RenderableType:
    parts: list[RenderableType] = [
        Text(""),
        Text(plain(title), style="bold"),
        Padding(body, (0, 0, 0, 2), expand=False),
    ]
    if note:
        lines = "\n".join(map(plain, note.split("\n")))
        parts.append(Padding(Text(lines, style="dim"), (0, 0, 0, 2), expand=False))
    return Group(*parts)
