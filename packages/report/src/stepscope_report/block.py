"""Blocks of text that both a terminal and a page can draw."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class TextTable(msgspec.Struct, frozen=True, tag="table"):
    """A titled table of printed cells."""

    title: str
    columns: tuple[str, ...]
    """Column names. A column whose name starts with `>` holds numbers: right-aligned and never broken."""
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    noun: str = ""
    """Noun for one row. A table with a noun is cut in a terminal, and the note counts the other rows."""


class Listing(msgspec.Struct, frozen=True, tag="list"):
    """A titled list of lines. Long ones are cut in a terminal and folded on a page."""

    title: str
    lines: tuple[str, ...]
    bad: bool = False
    """True if the lines are problems, which a page shows in red."""


class Paragraph(msgspec.Struct, frozen=True, tag="text"):
    """A sentence or two without a title."""

    text: str


class Remark(msgspec.Struct, frozen=True):
    """A line, with further lines that explain it."""

    text: str
    details: tuple[str, ...] = ()


class Remarks(msgspec.Struct, frozen=True, tag="remarks"):
    """A titled list of remarks, never cut."""

    title: str
    remarks: tuple[Remark, ...]


Block: TypeAlias = TextTable | Listing | Paragraph | Remarks
