"""Names of tools, by the attribute `name` of their spans."""

from __future__ import annotations

from collections import defaultdict

from stepscope.report.accounting import Label
from stepscope.report.stage_names import is_tool
from stepscope.timeline import Span, Timeline

NAME = "name"
MOST = 20
"""Names that a stage may have. More are no names of tools, but of calls."""
_LENGTH = 40


class ToolNames:
    """The names of the tools of a step."""

    def __init__(self, timeline: Timeline) -> None:
        names: dict[Label, set[str]] = defaultdict(set)
        for span in timeline.spans:
            name = _stated(span)
            if name is not None:
                names[span.role, span.stage].add(name)
        self._named = {label for label, own in names.items() if len(own) <= MOST}
        self._parts = {
            (role, title(stage, name)): (stage, name)
            for role, stage in self._named
            for name in names[role, stage]
        }

    def of(self, span: Span) -> str | None:
        """Return the name of the tool that a span calls. None: it is no tool, or has no name."""
        return _stated(span) if (span.role, span.stage) in self._named else None

    def label_of(self, span: Span) -> Label:
        """Return a label that tells tools of one stage apart."""
        return span.role, title(span.stage, self.of(span))

    def parts(self, label: Label) -> tuple[str, str | None]:
        """Return the stage and the name that make up the second part of a label."""
        return self._parts.get(label, (label[1], None))


def title(stage: str, name: str | None) -> str:
    """Return `tool search`, or the stage alone."""
    return stage if name is None else f"{stage} {name}"


def _stated(span: Span) -> str | None:
    value = (span.attrs or {}).get(NAME)
    if not isinstance(value, str) or not is_tool(span.role, span.stage):
        return None
    return " ".join(value.split())[:_LENGTH] or None
