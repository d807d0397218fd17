"""One section of a report: a value computed from a step, and its drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import msgspec

from stepscope_report.html import Colours, Html, draw_section
from stepscope_report.spans import few_names
from stepscope_report.suspects import StepPath, step_path
from stepscope_report.table import Block
from stepscope_report.timeline import Timeline, TraceActivity, Traces

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.near import NearStep

Value = TypeVar("Value")

GROUPS = ("Overview", "Rollout", "Processes", "Devices", "Record")
"""Groups of sections, in the order of a page. The links at the top of the page lead to the groups."""
OVERVIEW, ROLLOUT, PROCESSES, DEVICES, RECORD = range(len(GROUPS))


class Sources:
    """The sources of a step's sections: its timeline, its traces, and other sections."""

    def __init__(self, timeline: Timeline, traces: Traces | None, near: Sequence[NearStep] = ()) -> None:
        self.whole = timeline
        """The timeline with all names, for sections that list single calls."""
        self.timeline, self.names = few_names(timeline)
        self.traces = traces
        """The traces, or None if the traces were not read."""
        self.near = near
        """Captured steps near this step, to compare this step with."""
        self._values: dict[str, object] = {}

    @property
    def activities(self) -> Sequence[TraceActivity]:
        """Return the contents of the step's traces. Empty if the traces were not read."""
        return () if self.traces is None else self.traces.activities

    @cached_property
    def path(self) -> StepPath:
        """The critical path of the step, computed once."""
        return step_path(self.timeline)

    def value_of(self, section: Section[Value]) -> Value:
        """Return the value of a section. Each section is computed once."""
        if section.name not in self._values:
            self._values[section.name] = section.compute(self)
        return cast(Value, self._values[section.name])


class Page(NamedTuple):
    """The page that a section is drawn on."""

    timeline: Timeline
    report: StepReport
    colours: Colours


class Section(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """One section of a report.

    Attributes:
        name: The field of `StepReport` and of `--json`, and the anchor on the page if `html` is None. A
            section of another package is in `added`, under the name of its entry point.
        title: The heading on the page and in the docs. Terminal tables have their own titles. Empty for a
            value that other sections draw.
        compute: A pure function of the step that returns the value.
        terminal: A function that returns the value as tables and lists of text. Its second argument gives
            access to other sections. None if other sections draw the value, or if the section is from another
            package and its value is blocks.
        html: A function that returns the value as markup with charts, or None to show the tables of
            `terminal` on the page.
        page: Index in `GROUPS` of the section's group on the page. Sections of a group keep their order.
    """

    name: str
    title: str = ""
    compute: Callable[[Sources], Value]
    terminal: Callable[[Value, StepReport], Iterable[Block]] | None = None
    html: Callable[[Value, Page], Iterable[Html]] | None = None
    page: int = RECORD

    def blocks_of(self, report: StepReport) -> Iterable[Block]:
        """Return the tables and lists of this section in a report."""
        return () if self.terminal is None else self.terminal(getattr(report, self.name), report)

    def html_of(self, page: Page) -> Iterable[Html]:
        """Return the markup of this section on a page."""
        if self.html is not None:
            return self.html(getattr(page.report, self.name), page)
        return draw_section(self.name, self.title, self.blocks_of(page.report))
