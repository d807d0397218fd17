"""A report section: the stages of a step."""

from __future__ import annotations

from stepscope_report.sections import Section, Sources
from stepscope_report.table import TextTable


def stages(sources: Sources) -> TextTable:
    rows = tuple((f"toy stage {span.stage}",) for span in sources.timeline.spans)
    return TextTable("Toy stages", ("stage",), rows)


SECTION = Section(name="toy", title="Toy stages", compute=stages)
