"""Sections of other packages, through the entry points `stepscope.report_sections`.

An entry point names a `Section`:

    [project.entry-points."stepscope.report_sections"]
    tokens = "my_package:TOKENS"

    from stepscope_report.block import TextTable
    from stepscope_report.section import Section, Sources

    def tokens(sources: Sources) -> TextTable:
        rows = tuple((span.stage, str(span.attrs.get("tokens", "-"))) for span in sources.timeline.spans)
        return TextTable("Tokens", ("stage", ">tokens"), rows)

    TOKENS = Section(name="tokens", title="Tokens", compute=tokens)

`compute` gets the step's timeline, its traces if they were read, and the values of the sections of
`stepscope_report.sections` by `sources.value_of(...)`. It returns a block of `stepscope_report.block`,
or several. Terminal, page and JSON (`added`) show them after all other sections, by entry point name.
Renderers of its own (`terminal`, `html`) are not used. If a section raises, the report says so and keeps all
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import msgspec

from stepscope_report.block import Block
from stepscope_report.model import AddedSection
from stepscope_report.section import Section, Sources

GROUP = "stepscope.report_sections"


def added_sections(sources: Sources) -> tuple[AddedSection, ...]:
    """Return the sections of other packages, by name."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return tuple(_added(point, sources) for point in points)


def _added(point: EntryPoint, sources: Sources) -> AddedSection:
    title = point.name
    try:
        section = point.load()
        if not isinstance(section, Section):
            raise TypeError(f"{point.value} is a {type(section).__name__}, and no Section")
        title = section.title or title
        return AddedSection(name=point.name, title=title, tables=_blocks(section.compute(sources)))
    except Exception as error:  # another package's code: its section is lost, and the report is not
        return AddedSection(name=point.name, title=title, failed=f"{type(error).__name__}: {error}")


def _blocks(value: object) -> tuple[Block, ...]:
    """Return the computed blocks, checked to the last cell.

    Raises:
        msgspec.ValidationError: `value` is no block, and no blocks.
    """
    several = value if isinstance(value, Iterable) else (value,)
    return msgspec.convert([msgspec.to_builtins(block) for block in several], tuple[Block, ...])
