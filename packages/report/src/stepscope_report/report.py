"""The sections of a report, in order: terminal, page and JSON follow this list.

A test compares the headings of docs/report.md with it. A section of another package comes through the entry
points `stepscope.report_sections`: see `added`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from stepscope_report.added import added_sections
from stepscope_report.model import StepReport
from stepscope_report.near import NearStep
from stepscope_report.section import Section, Sources
from stepscope_report.sections.advice import ADVICE
from stepscope_report.sections.baseline import BASELINE
from stepscope_report.sections.batches import BATCHES
from stepscope_report.sections.breakdown import BREAKDOWN
from stepscope_report.sections.cause import CAUSE, UNEXPLAINED
from stepscope_report.sections.collectives import COLLECTIVES
from stepscope_report.sections.counters import COUNTERS
from stepscope_report.sections.critical_path import CRITICAL_PATH
from stepscope_report.sections.cuda_memory import CUDA_MEMORY
from stepscope_report.sections.engines import ENGINES, PHASELESS
from stepscope_report.sections.gaps import GAPS
from stepscope_report.sections.health import HEALTH
from stepscope_report.sections.idle import IDLE
from stepscope_report.sections.labels import LABELS
from stepscope_report.sections.long_tail import LONG_TAIL
from stepscope_report.sections.metrics import METRICS
from stepscope_report.sections.operators import TRACES
from stepscope_report.sections.requests import REQUESTS
from stepscope_report.sections.stages import STAGES
from stepscope_report.sections.staleness import STALENESS
from stepscope_report.sections.throughput import THROUGHPUT
from stepscope_report.sections.vain_waits import VAIN_WAITS
from stepscope_report.sections.weight_sync import WEIGHT_SYNC
from stepscope_report.timeline import Timeline, Traces

SECTIONS: tuple[Section[Any], ...] = (
    CAUSE,
    UNEXPLAINED,
    ADVICE,
    BASELINE,
    BREAKDOWN,
    CRITICAL_PATH,
    STAGES,
    IDLE,
    VAIN_WAITS,
    LONG_TAIL,
    STALENESS,
    ENGINES,
    PHASELESS,
    BATCHES,
    REQUESTS,
    THROUGHPUT,
    WEIGHT_SYNC,
    GAPS,
    LABELS,
    COLLECTIVES,
    TRACES,
    CUDA_MEMORY,
    COUNTERS,
    METRICS,
    HEALTH,
)


def step_report(
    timeline: Timeline, traces: Traces | None = None, near: Sequence[NearStep] = ()
) -> StepReport:
    """Return the report of one step. The same timeline and traces give the same tables.

    Args:
        traces: The step's traces, from `load_traces`, or None for a report of spans alone.
        near: Other captured steps of its kind, from `Neighbours`, that its cause is compared with.
    """
    sources = Sources(timeline, traces, near)
    report = StepReport(
        step=timeline.step,
        run_id=timeline.run_id,
        runs=timeline.runs,
        tracer=timeline.tracer,
        opened_ns=timeline.window.start_ns,
        **{section.name: sources.value_of(section) for section in SECTIONS},
    )
    return structs.replace(report, added=added_sections(sources, report))
