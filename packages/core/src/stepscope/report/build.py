"""The report of one step, from its timeline and traces."""

from __future__ import annotations

from stepscope.report.added import added_sections
from stepscope.report.model import StepReport
from stepscope.report.section import Sources
from stepscope.report.sections import SECTIONS
from stepscope.timeline import Timeline, Traces


def step_report(timeline: Timeline, traces: Traces | None = None) -> StepReport:
    """Return the report of one step. The same timeline and traces give the same tables.

    Args:
        traces: The step's traces, from `load_traces`. None: the report is of spans alone.
    """
    sources = Sources(timeline, traces)
    return StepReport(
        step=timeline.step,
        run_id=timeline.run_id,
        runs=timeline.runs,
        opened_ns=timeline.window.start_ns,
        added=added_sections(sources),
        **{section.name: sources.value_of(section) for section in SECTIONS},
    )
