"""A step's report as tables for a terminal, 100 columns wide. Colour alone carries no meaning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.report.blocks.advice import advice_blocks
from stepscope.report.blocks.baseline import say_beside, say_usual
from stepscope.report.blocks.breakdown import BESIDE, account_table
from stepscope.report.blocks.health import say_again, say_ended, say_incomplete, say_recorder
from stepscope.report.formatting import duration, moment, percents, plain
from stepscope.report.model import StepReport
from stepscope.report.sections import SECTIONS
from stepscope.report.terminal.layout import draw, table


def render(report: StepReport) -> Group:
    sections = [section.blocks_of(report) for section in SECTIONS]
    added = [section.blocks() for section in report.added]
    return Group(_head(report), *map(draw, chain(*sections, *added)))


def render_short(report: StepReport) -> Group:
    """Return how long one step took, what to do first, and where its time went."""
    first = advice_blocks(report.advice[:1], report)
    return Group(_head(report), *map(draw, (*first, account_table(report.breakdown))))


def render_overview(reports: Sequence[StepReport]) -> RenderableType:
    runs = len({report.run_id for report in reports}) > 1
    columns = (
        ">step", *(["run"] * runs), ">took", ">uncaptured", f">{BESIDE}", ">unaccounted", "largest stages",
        "complete",
    )  # fmt: skip
    note = "%: of the step (took). uncaptured: the median of steps near it that were not captured.\n"
    note += f"{BESIDE}: the capture, outside of the step."
    return table("Steps", columns, [_overview(report, runs) for report in reports], note)


def _overview(report: StepReport, runs: bool) -> list[str]:
    breakdown, lines = report.breakdown, report.breakdown.lines
    shares = list(zip(lines, percents([line.wall_ns for line in lines], breakdown.window_ns), strict=True))
    other = {line.kind: f"{share} %" for line, share in shares if line.kind != "stage"}
    most = ", ".join(f"{line.stage} {share} %" for line, share in shares[:2] if line.kind == "stage")
    complete = "yes" if report.health.complete else "no"
    complete += "" if report.health.user_error is None else ", ended early"
    run = [report.run_id] * runs
    usual_ns = None if report.baseline is None else report.baseline.p50_ns
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    took = duration(breakdown.window_ns), duration(usual_ns), duration(beside_ns)
    return [str(report.step), *run, *took, other["unaccounted"], most, complete]


def _head(report: StepReport) -> Text:
    total_ns, window_ns = report.breakdown.total_ns, report.breakdown.window_ns
    took = duration(window_ns)
    if report.health.recorder is None:
        took += f" ({duration(total_ns)} with opening and closing the capture)"
    lines = [f"Step {report.step} of run {plain(report.run_id)}, {moment(report.opened_ns)}: {took}"]
    health, baseline = report.health, report.baseline
    lines += [say_recorder(health), say_ended(health), plain(say_incomplete(health)), say_again(health)]
    lines += [say_usual(baseline), say_beside(baseline)]
    others = [plain(run) for run in report.runs if run != report.run_id]
    if others:
        lines.append(f"Other runs wrote into this folder, see --run: {', '.join(others)}")
    return Text("\n".join(filter(None, lines)), style="bold")
