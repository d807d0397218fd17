"""A run's page: its captured steps side by side, and what changed between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

import msgspec

from stepscope_report.accounting import Label
from stepscope_report.diff import step_changes
from stepscope_report.formatting import count, duration, middle
from stepscope_report.html import (
    Colours,
    Html,
    draw,
    join,
    legend,
    listing,
    page,
    section,
    stacked,
    swatched,
    table,
    tag,
)
from stepscope_report.model import StepReport
from stepscope_report.sections.breakdown import BESIDE, LINES, OVERVIEW_NOTES, overview_cells
from stepscope_report.sections.health import say_others

OTHERS = ("profiler", "unaccounted")
"""Kinds of lines in the account that are no stages."""


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    report: StepReport
    href: str | None
    """Path of the step's page, relative to the run's page. None if the step has no page."""


def render_run(
    steps: Sequence[RunStep], unreadable: Sequence[str] = (), others: Mapping[str, Sequence[int]] = {}
) -> str:
    """Return the page of a run.

    Args:
        steps: Steps of one run in order, at least one.
        unreadable: A line with the reason for each step that could not be read.
        others: Steps of other runs in the folder, which are left out, by the id of the run.
    """
    reports = [step.report for step in steps]
    lines = (line for report in reports for line in report.breakdown.lines if line.waits)
    colours = Colours(_labels(reports), [(line.role or "", line.stage or "") for line in lines])
    parts = [_head(reports, others), _side_by_side(steps, colours)]
    if len(steps) > 1:
        changes = draw(step_changes(reports), "What changed")
        parts += [_by_stage(reports, colours), section("changes", "What changed", changes)]
    if unreadable:
        parts.append(section("unreadable", "Unreadable", listing("Steps", unreadable, "bad")))
    return page(f"Run {reports[0].run_id}", *parts)


def _labels(reports: Sequence[StepReport]) -> list[Label]:
    """Return the stages of all steps by their total share, the largest first."""
    wall_ns: Counter[Label] = Counter()
    for report in reports:
        for line in report.breakdown.lines:
            if line.kind == "stage":
                wall_ns[line.role or "", line.stage or ""] += line.wall_ns
    return [label for label, _ in wall_ns.most_common()]


def _head(reports: Sequence[StepReport], others: Mapping[str, Sequence[int]]) -> Html:
    took = [report.breakdown.window_ns for report in reports]
    run_id = reports[0].run_id
    summary = (
        f"{count(len(reports), 'captured step')}: median {duration(middle(took))}, "
        f"{duration(min(took))} to {duration(max(took))}"
    )
    notes = [summary, say_others(run_id, others)] if others else [summary]
    return tag("header", tag("h1", f"Run {run_id}"), *(tag("p", note, class_="note") for note in notes))


def _side_by_side(steps: Sequence[RunStep], colours: Colours) -> Html:
    longest_ns = max(step.report.breakdown.window_ns for step in steps)
    rows = [_step(step, longest_ns, colours) for step in steps]
    columns = ("step", "", ">took", ">uncaptured", f">{BESIDE}", ">unaccounted", "complete")
    lines = [line for step in steps for line in step.report.breakdown.lines]
    used = {(line.role or "", line.stage or "") for line in lines if line.wall_ns}
    kinds = [kind for kind in OTHERS if any(_of_kind(step.report, kind) for step in steps)]
    key = join(colours.legend(used), legend((kind, kind) for kind in kinds))
    body = tag("div", table(columns, rows, "steps-table"), class_="steps")
    return section("steps", "Where each step went", key, body, note=" ".join(OVERVIEW_NOTES))


def _of_kind(report: StepReport, kind: str) -> int:
    return sum(line.wall_ns for line in report.breakdown.lines if line.kind == kind)


def _step(step: RunStep, longest_ns: int, colours: Colours) -> tuple[str | Html, ...]:
    report = step.report
    *cells, complete = overview_cells(report)
    name = str(report.step)
    bar = stacked(_bars(report, colours), longest_ns)
    linked = tag("a", name, href="./" + quote(step.href)) if step.href else name
    return linked, bar, *cells, tag("span", complete, class_="good" if complete == "yes" else "bad")


def _bars(report: StepReport, colours: Colours) -> Iterator[tuple[str, int, str]]:
    """Yield a step's stages in the page's order, so that the bars of the steps can be compared."""
    order = {label: place for place, label in enumerate(colours.labels)}
    lines = sorted(
        report.breakdown.lines, key=lambda line: order.get((line.role or "", line.stage or ""), len(order))
    )
    for line in lines:
        if line.wall_ns:
            kind = colours.of((line.role or "", line.stage or "")) if line.kind == "stage" else line.kind
            hover = f"{line.role or ''} {line.stage or line.kind} {duration(line.wall_ns)}".strip()
            yield kind, line.wall_ns, hover


def _by_stage(reports: Sequence[StepReport], colours: Colours) -> Html:
    """Return a table of wall time by stage and step. Cells are shaded by their distance from the stage's
    median.
    """
    columns = ("stage", *(f">{report.step}" for report in reports), ">median")
    walls = [{(x.role or "", x.stage or x.kind): x.wall_ns for x in r.breakdown.lines} for r in reports]
    kinds = [kind for kind in OTHERS if any(_of_kind(report, kind) for report in reports)]
    labels: list[Label] = [*colours.labels[:LINES], *(("", kind) for kind in kinds)]
    least_ns = middle(report.breakdown.window_ns for report in reports) // 100
    rows = [_stage(label, [wall.get(label, 0) for wall in walls], least_ns, colours) for label in labels]
    note = "Shaded where a stage is off its median by 1 % of the median step or more."
    if len(colours.labels) > LINES:
        note += f" The first {LINES} stages by their share of all steps."
    return section("stages", "By stage", table(columns, rows, "by-stage"), note=note)


def _stage(label: Label, wall_ns: Sequence[int], least_ns: int, colours: Colours) -> list[str | Html]:
    median_ns = middle(wall_ns)
    colour = colours.of(label) if label[0] else label[1]
    cells = [tag("span", duration(ns), class_=_shade(ns, median_ns, least_ns)) for ns in wall_ns]
    return [swatched(colour, " ".join(filter(None, label))), *cells, duration(median_ns)]


def _shade(ns: int, median_ns: int, least_ns: int) -> str:
    """Return the CSS class of a cell by its distance from the median, in tenths. Empty if the distance is
    small.
    """
    if abs(ns - median_ns) < max(least_ns, 1):
        return "shade"
    ratio = ns / median_ns if median_ns else 2.0
    return f"shade h{max(-5, min(5, round((ratio - 1) * 10)))}"
