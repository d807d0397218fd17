"""One section of a report: a value computed from a step, and its drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import msgspec

from stepscope_report.block import Block
from stepscope_report.html.page import Colours, Html, draw_section
from stepscope_report.spans import few_names
from stepscope_report.suspects import StepPath, step_path
from stepscope_report.timeline import Timeline, TraceActivity, Traces

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.near import NearStep

Value = TypeVar("Value")

GROUPS = ("Overview", "Rollout", "Processes", "Devices", "Record")
"""Groups of sections on a page, in its order: the links at its top."""
OVERVIEW, ROLLOUT, PROCESSES, DEVICES, RECORD = range(len(GROUPS))


class Sources:
    """The sources of a step's sections: its timeline, its traces, and other sections."""

    def __init__(self, timeline: Timeline, traces: Traces | None, near: Sequence[NearStep] = ()) -> None:
        self.whole = timeline
        """The timeline with all names, for sections that list single calls."""
        self.timeline, self.names = few_names(timeline)
        self.traces = traces
        """The traces; None if they were not read."""
        self.near = near
        """Captured steps to compare with."""
        self._values: dict[str, object] = {}

    @property
    def activities(self) -> Sequence[TraceActivity]:
        """Return the contents of the traces. Empty if they were not read."""
        return () if self.traces is None else self.traces.activities

    @cached_property
    def path(self) -> StepPath:
        """Return what the step waited for. Computed once."""
        return step_path(self.timeline)

    def value_of(self, section: Section[Value]) -> Value:
        """Return the value of a section, computed once."""
        if section.name not in self._values:
            self._values[section.name] = section.compute(self)
        return cast(Value, self._values[section.name])


class StepFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a step, or a folder of its files, for a page to point to."""

    path: str
    """Path relative to the page, with `/` between its parts."""
    what: str
    """A description for people."""
    bytes: int


class Page(NamedTuple):
    """The page that a section is drawn on."""

    timeline: Timeline
    report: StepReport
    colours: Colours
    files: Sequence[StepFile]
    """Files of the step that the page links to."""


class Section(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """One section of a report.

    Attributes:
        name: The field of `StepReport` and of `--json`, and the anchor on the page where `html` is None. A
            section of another package stands in `added` under its entry point's name.
        title: The heading on the page and in the docs; terminal tables have titles of their own. Empty for a
            value that other sections draw.
        compute: Returns the value. A pure function of the step.
        terminal: Returns the value as tables and lists of text, for the terminal. The report is for
            figures of other sections. None if other sections draw the value, or, in a section of another
            package, if the value itself is blocks.
        html: Returns the value as markup with charts. None to show the tables of `terminal` on the page.
        page: Group on the page, a place in `GROUPS`. Sections of one group stand as in the list.
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
