"""Tables and lists for a terminal, and tables as Markdown, of any content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope_report.formatting import LISTED, count, plain
from stepscope_report.table import Block, Listing, Remarks, TextTable

_SHARE = re.compile(r" (\S+ %)$")
ROWS = 2 * LISTED
"""Largest number of printed rows of a table that may be cut. A note counts the rows left out."""


def draw(block: Block) -> RenderableType:
    if isinstance(block, TextTable):
        return _cut_table(block)
    if isinstance(block, Listing):
        return listing(block.title, block.lines)
    if isinstance(block, Remarks):
        return _remarks(block)
    return Text(f"\n{plain(block.text)}")


def _cut_table(block: TextTable) -> RenderableType:
    if not block.noun or len(block.rows) <= ROWS:
        return table(block.title, block.columns, block.rows, block.note)
    more = f"{count(len(block.rows) - ROWS, block.noun)} more in --json."
    return table(block.title, block.columns, block.rows[:ROWS], f"{more} {block.note}".rstrip())


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
    """Return a titled table. A column whose name starts with `>` holds numbers and is right-aligned.

    No digit is lost. In a narrow terminal, headings and texts take more lines. If that is not enough, gaps
    become narrower, words are broken, and shares are put below their times; at last, each row is a
    paragraph.
    """
    return _titled(title, _Grid(columns, [[plain(cell) for cell in row] for row in rows]), note)


class _Grid:
    def __init__(self, columns: Sequence[str], rows: list[list[str]]) -> None:
        self.headings = [plain(name.lstrip(">")) for name in columns]
        self.numbers = [name.startswith(">") for name in columns]
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gaps = len(self.headings) - 1
        rows, gap, least = self.rows, 3, self._least(self.rows)
        whole = [max(pair) for pair in zip(least, self._longest_words(), strict=True)]
        if sum(whole) + gaps <= options.max_width:  # make the gaps narrower before names are broken
            least, gap = whole, 3 if sum(whole) + gap * gaps <= options.max_width else 1
        if sum(least) + gap * gaps > options.max_width:
            rows = [[_SHARE.sub(r"\n\1", cell) for cell in row] for row in rows]
            gap, least = 1, self._least(rows)
        if sum(least) + gap * gaps > options.max_width:
            for row in self.rows:
                cells = zip(self.headings, row, strict=True)
                yield Text(", ".join(f"{heading} {cell}".strip() for heading, cell in cells if cell))
            return
        yield self._drawn(rows, gap, self._widths(rows, least, options.max_width - gap * gaps))

    def _least(self, rows: list[list[str]]) -> list[int]:
        """Return the smallest widths at which no word of a heading and no line of a number is broken."""
        words = [heading.split() for heading in self.headings]
        for row in rows:
            for at, cell in enumerate(row):
                if self.numbers[at]:
                    words[at] += cell.split("\n")
        return [max(map(cell_len, parts), default=0) for parts in words]

    def _longest_words(self) -> list[int]:
        columns = zip(self.headings, *self.rows, strict=True)
        return [
            max(cell_len(word) for cell in column for word in (cell.split() or [""])) for column in columns
        ]

    def _widths(self, rows: list[list[str]], least: list[int], room: int) -> list[int]:
        """Return the widths that the columns need; if there is not enough room, the widest columns are
        narrowed.
        """
        columns = zip(self.headings, *rows, strict=True)
        widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
        while sum(widths) > room:
            spare = [at for at, width in enumerate(widths) if width > least[at]]
            if not spare:
                break
            widths[max(spare, key=widths.__getitem__)] -= 1
        return widths

    def _drawn(self, rows: list[list[str]], gap: int, widths: list[int]) -> Table:
        grid = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, gap // 2),
            pad_edge=False,
            show_edge=False,
            header_style="bold",
        )
        for heading, number, width in zip(self.headings, self.numbers, widths, strict=True):
            grid.add_column(
                Text(heading), justify="right" if number else "left", overflow="fold", width=width
            )
        for row in rows:
            grid.add_row(*map(Text, row))
        return grid


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


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. `>` before a column's name aligns it to the right."""
    head = [column.removeprefix(">") for column in columns]
    rule = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = (head, rule, *([_cell(text) for text in row] for row in rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|")
