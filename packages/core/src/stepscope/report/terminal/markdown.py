"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.report.formatting import plain


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. `>` before a column's name aligns it to the right."""
    head = [column.removeprefix(">") for column in columns]
    rule = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = (head, rule, *([_cell(text) for text in row] for row in rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|")
