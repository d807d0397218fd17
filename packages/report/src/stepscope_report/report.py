"""The sections of a report, in the order of the terminal, the page and the JSON.

A test compares the headings of docs/report.md with this list. Other packages add sections by the entry points
`stepscope.report_sections`; docs/extending.md has an example. The terminal and the JSON (`added`) show added
sections last, by the name of the entry point. On the page, every section is in the group that its
`Section.page` gives. If an added section raises an exception, the report names it and keeps the other
sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from stepscope_report.formatting import count
from stepscope_report.html import Html, draw_section
from stepscope_report.model import AddedSection, StepReport
from stepscope_report.near import NearStep
from stepscope_report.sections import RECORD, Page, Section, Sources
from stepscope_report.sections.advice import ADVICE
from stepscope_report.sections.baseline import BASELINE, COMPARED
from stepscope_report.sections.batches import BATCHES
from stepscope_report.sections.breakdown import BREAKDOWN
from stepscope_report.sections.cause import CAUSE, UNEXPLAINED
from stepscope_report.sections.collectives import COLLECTIVES
from stepscope_report.sections.counters import COUNTERS
from stepscope_report.sections.critical_path import CRITICAL_PATH, VAIN_WAITS
from stepscope_report.sections.cuda_memory import CUDA_MEMORY
from stepscope_report.sections.engines import ENGINES, PHASELESS
from stepscope_report.sections.gaps import GAPS
from stepscope_report.sections.health import HEALTH
from stepscope_report.sections.idle import IDLE
from stepscope_report.sections.labels import LABELS
from stepscope_report.sections.long_tail import LONG_TAIL
from stepscope_report.sections.metrics import METRICS
from stepscope_report.sections.requests import REQUESTS
from stepscope_report.sections.stages import STAGES
from stepscope_report.sections.staleness import STALENESS
from stepscope_report.sections.throughput import THROUGHPUT
from stepscope_report.sections.traces import TRACES
from stepscope_report.sections.weight_sync import WEIGHT_SYNC
from stepscope_report.table import Block, TextTable
from stepscope_report.timeline import Timeline, Traces

SECTIONS: tuple[Section[Any], ...] = (
    CAUSE,
    UNEXPLAINED,
    ADVICE,
    BASELINE,
    COMPARED,
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
        traces: The step's traces, from `load_traces`, or None for a report of spans only.
        near: Other captured steps of the same kind, from `Neighbours`, to compare this step with.
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
    return msgspec.structs.replace(report, added=_added_sections(sources, report))


def _added_sections(sources: Sources, report: StepReport) -> tuple[AddedSection, ...]:
    """Return the sections of other packages, by name.

    Args:
        report: The report without added sections.
    """
    return tuple(_added(point, sources, report) for point in _points())


def pages_of(page: Page) -> Iterator[tuple[int, list[Html]]]:
    """Yield (index of the group on the page, markup) for each added section."""
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
    return sorted(entry_points(group="stepscope.report_sections"), key=lambda point: point.name)


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
        msgspec.to_builtins(value)  # raises here, for this section alone, if JSON cannot hold the value
        tables = _blocks(section.terminal(value, report))
        return AddedSection(name=point.name, title=title, tables=tables, value=value)
    except Exception as error:  # code of another package must not end the report
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
