"""A step's report as tables for a terminal, 100 columns wide. Colour alone carries no meaning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope_report.formatting import duration, moment, percents, plain
from stepscope_report.model import StepReport
from stepscope_report.report import SECTIONS
from stepscope_report.sections.advice import advice_blocks
from stepscope_report.sections.baseline import say_beside, say_usual
from stepscope_report.sections.breakdown import (
    BESIDE,
    OVERVIEW_NOTES,
    account_table,
    between_ns,
    overview_cells,
)
from stepscope_report.sections.health import (
    say_again,
    say_ended,
    say_incomplete,
    say_other_runs,
    say_recorder,
)
from stepscope_report.terminal.layout import draw, table


def render(report: StepReport) -> Group:
    sections = [section.blocks_of(report) for section in SECTIONS]
    added = [section.blocks() for section in report.added]
    return Group(_head(report), *map(draw, chain(*sections, *added)))


def render_short(report: StepReport) -> Group:
    """Return the duration of one step, what to do first, and where its time went."""
    first = advice_blocks(report.advice[:1], report)
    return Group(_head(report), *map(draw, (*first, account_table(report.breakdown, between_ns(report)))))


def render_overview(reports: Sequence[StepReport]) -> RenderableType:
    columns = (
        ">step", ">took", ">uncaptured", f">{BESIDE}", ">unaccounted", "largest stages", "complete"
    )  # fmt: skip
    return table("Steps", columns, list(map(_overview, reports)), "\n".join(OVERVIEW_NOTES))


def _overview(report: StepReport) -> list[str]:
    lines = report.breakdown.lines
    shares = zip(lines, percents([line.wall_ns for line in lines], report.breakdown.window_ns), strict=True)
    most = ", ".join(f"{line.stage} {share} %" for line, share in islice(shares, 2) if line.kind == "stage")
    *cells, complete = overview_cells(report)
    return [str(report.step), *cells, most, complete]


def _head(report: StepReport) -> Text:
    total_ns, window_ns = report.breakdown.total_ns, report.breakdown.window_ns
    with_capture = f"{duration(total_ns)} with opening and closing the capture"
    if report.cause is not None:
        took = f"{report.cause.sentence}. {with_capture}"
    else:
        took = f"{duration(window_ns)} ({with_capture})"
    if report.health.recorder is not None or report.tracer:
        took = duration(window_ns) if report.cause is None else report.cause.sentence
    lines = [plain(f"{report.name}, {moment(report.opened_ns)}: {took}")]
    health, baseline = report.health, report.baseline
    lines += [say_recorder(health), say_ended(health), plain(say_incomplete(health)), say_again(health)]
    lines += [] if report.tracer else [say_usual(baseline), say_beside(baseline)]
    lines.append(plain(say_other_runs(report)))
    return Text("\n".join(filter(None, lines)), style="bold")
