"""A report section: the stages of a step."""

from __future__ import annotations

from stepscope_report.block import TextTable
from stepscope_report.section import Section, Sources


def stages(sources: Sources) -> TextTable:
    rows = tuple((f"toy stage {span.stage}",) for span in sources.timeline.spans)
    return TextTable("Toy stages", ("stage",), rows)


SECTION = Section(name="toy", title="Toy stages", compute=stages)
