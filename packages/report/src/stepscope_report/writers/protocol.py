"""The contract of a writer: one function, found through the entry points `stepscope.writers`."""

from __future__ import annotations

from typing import Protocol

import msgspec

from stepscope.files.layout import RunLayout
from stepscope_report import StepReport
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import Timeline


class ReportedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as a writer gets it."""

    run: RunLayout
    """The run's folder."""
    report: StepReport
    timeline: Timeline
    scalars: dict[str, float]
    """Numbers by name, as `stepscope_report.to_scalars` makes them."""

    @property
    def page(self) -> str:
        """Return `report.html` of the step, without its traces."""
        return render_step(self.timeline, self.report)


class ReportWriter(Protocol):
    """Gives a step to a store, in a process of its own beside the training.

    If it raises, the manifest records the error as the reason why the store does not have the step.
    """

    def __call__(self, step: ReportedStep, /) -> None: ...
