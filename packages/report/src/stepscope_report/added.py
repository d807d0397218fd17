"""Sections of other packages, through the entry points `stepscope.report_sections`.

docs/extending.md has an example. `compute` gets the step's timeline, its traces if they were read, and the
values of the sections of `stepscope_report.sections` by `sources.value_of(...)`. `terminal` and `html` draw
the value. Without `terminal` the value itself is a block of `stepscope_report.block`, or several.
Terminal and JSON (`added`) show the sections after all others, by entry point name; on the page, `page` ranks
them too. If a section raises, the report says so and keeps all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from stepscope_report.block import Block, TextTable
from stepscope_report.formatting import count
from stepscope_report.html.markup import Html
from stepscope_report.html.page import draw_section
from stepscope_report.model import AddedSection, StepReport
from stepscope_report.section import RECORD, Page, Section, Sources

GROUP = "stepscope.report_sections"


def added_sections(sources: Sources, report: StepReport) -> tuple[AddedSection, ...]:
    """Return the sections of other packages, by name.

    Args:
        report: The report without them.
    """
    return tuple(_added(point, sources, report) for point in _points())


def pages_of(page: Page) -> Iterator[tuple[int, list[Html]]]:
    """Yield the rank of each added section on the page, and its markup."""
    points = {point.name: point for point in _points()} if page.report.added else {}
    for added in page.report.added:
        rank, drawn = RECORD, None
        if added.failed is None and added.name in points:
            try:
                section = _load(points[added.name])
                rank = section.page
                drawn = None if section.html is None else _markup(section.html(added.value, page))
            except Exception as error:
                added = msgspec.structs.replace(added, failed=f"{type(error).__name__}: {error}")
        yield rank, drawn or list(draw_section(added.name, added.title, added.blocks()))


def _markup(drawn: Iterable[Html]) -> list[Html]:
    parts = list(drawn)
    for part in parts:
        if not isinstance(part, Html):
            raise TypeError(f"html returned {type(part).__name__}; allowed: Html, as `tag` returns it")
    return parts


def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _load(point: EntryPoint) -> Section[Any]:
    section = point.load()
    if not isinstance(section, Section):
        raise TypeError(f"{point.value} is a {type(section).__name__}, and no Section")
    return section


def _added(point: EntryPoint, sources: Sources, report: StepReport) -> AddedSection:
    title = point.name
    try:
        section = _load(point)
        title = section.title or title
        value = sources.value_of(msgspec.structs.replace(section, name=f"added {point.name}"))
        if section.terminal is None:
            return AddedSection(name=point.name, title=title, tables=_blocks(value), value=None)
        msgspec.to_builtins(value)  # for JSON, while its failure is the section's alone
        tables = _blocks(section.terminal(value, report))
        return AddedSection(name=point.name, title=title, tables=tables, value=value)
    except Exception as error:  # another package's code: its section is lost, and the report is not
        return AddedSection(name=point.name, title=title, failed=f"{type(error).__name__}: {error}")


def _blocks(value: object) -> tuple[Block, ...]:
    """Return the computed blocks, checked to the last cell.

    Raises:
        msgspec.ValidationError: `value` is neither a block nor a sequence of blocks.
        ValueError: a row of a table has more or fewer cells than the table has columns.
    """
    several = value if isinstance(value, Iterable) else (value,)
    blocks = msgspec.convert([msgspec.to_builtins(block) for block in several], tuple[Block, ...])
    for block in (block for block in blocks if isinstance(block, TextTable)):
        for number, row in enumerate(block.rows):
            if len(row) != len(block.columns):
                cells, columns = count(len(row), "cell"), count(len(block.columns), "column")
                raise ValueError(f"row {number} of the table {block.title} has {cells} for {columns}")
    return blocks
