"""The account of a step as a picture: bars that fall from 0 to 100 %."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope_report.blocks.breakdown import (
    BESIDE,
    gap_table,
    overlap_table,
    say_left_out,
    say_outside,
    waiting,
)
from stepscope_report.charts.gantt import draw_gantt
from stepscope_report.formatting import count, duration, percent_of, percents
from stepscope_report.html.colours import Colours
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import mark, section, swatched, table
from stepscope_report.html.timecharts import gantt
from stepscope_report.section import Page
from stepscope_report.tables.breakdown import Breakdown, Line

LINES = 24
"""Stages with a bar of their own; the smallest of more are one bar."""


def draw_breakdown(breakdown: Breakdown, page: Page) -> Iterable[Html]:
    """Return the account as a waterfall, and the chart of who ran what, when."""
    chart = draw_gantt(page.timeline, page.report.stages)
    return waterfall(breakdown, page.colours), gantt(chart, page.colours)


def waterfall(breakdown: Breakdown, colours: Colours) -> Html:
    """Return the account, each line of which begins where the one above it ends."""
    whole_ns = breakdown.window_ns
    shares = percents([line.wall_ns for line in breakdown.lines], whole_ns)
    stages = [line for line in breakdown.lines if line.kind == "stage"]
    folded = stages[LINES:]
    rows: list[Sequence[str | Html]] = []
    at_ns = folded_ns = 0
    for line, share in zip(breakdown.lines, shares, strict=True):
        if line in folded:
            folded_ns += line.wall_ns
            continue
        if line.kind != "stage" and folded_ns:
            rows.append(_folded(len(folded), at_ns, folded_ns, whole_ns))
            at_ns, folded_ns = at_ns + folded_ns, 0
        rows.append(_row(line, share, at_ns, whole_ns, colours))
        at_ns += line.wall_ns
    bar = _bar("total", 0, at_ns, whole_ns, f"step {duration(at_ns)}")
    rows.append((tag("b", "step"), bar, tag("b", percent_of(at_ns, whole_ns)), duration(at_ns), "", ""))
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    if beside_ns:
        rows.append((BESIDE, "", "", duration(beside_ns), "", ""))
    columns = ("stage", "", ">%", ">wall", ">alone", ">active")
    return section(
        "account",
        "Where it went",
        table(columns, rows, "waterfall"),
        *_gaps(breakdown),
        *_overlaps(breakdown),
        note=_note(breakdown),
    )


def _row(line: Line, share: str, at_ns: int, total_ns: int, colours: Colours) -> Sequence[str | Html]:
    if line.kind == "stage":
        label = (line.role or "", line.stage or "")
        kind, name = colours.of(label), " ".join(label) + waiting(line)
        times = (duration(line.alone_ns), duration(line.active_ns))
    else:
        kind, name, times = line.kind, line.kind, ("", "")
    hover = f"{line.role or ''} {line.stage or line.kind} {duration(line.wall_ns)}, {share} %".strip()
    bar = _bar(kind, at_ns, line.wall_ns, total_ns, hover)
    return (swatched(kind, name), bar, share, duration(line.wall_ns), *times)


def _folded(number: int, at_ns: int, wall_ns: int, total_ns: int) -> Sequence[str | Html]:
    name = f"{number} smaller stages"
    bar = _bar("co", at_ns, wall_ns, total_ns, f"{name} {duration(wall_ns)}")
    return (swatched("co", name), bar, percent_of(wall_ns, total_ns), duration(wall_ns), "", "")


def _bar(kind: str, at_ns: int, wall_ns: int, total_ns: int, hover: str) -> Html:
    return tag("div", mark(kind, at_ns, wall_ns, total_ns, hover), class_="fall")


def _note(breakdown: Breakdown) -> str:
    note = (
        "alone: not shared with other stages. active: how long it went on at all, billed to it or not. "
        "unaccounted: no span ran anywhere."
    )
    if any(line.kind == "profiler" for line in breakdown.lines):
        note += " profiler: profilers inside the step."
    if breakdown.opening_ns or breakdown.closing_ns:
        note += f" {say_outside(breakdown)}"
    if breakdown.left_out:
        note += f" {say_left_out(breakdown)}."
    return note


def _gaps(breakdown: Breakdown) -> Iterator[Html]:
    gaps = gap_table(breakdown)
    if gaps is not None:
        ns, number = sum(gap.wall_ns for gap in breakdown.gaps), sum(gap.count for gap in breakdown.gaps)
        title = f"Unaccounted: {duration(ns)} in {count(number, 'gap')}"
        yield tag("details", tag("summary", title), table(gaps.columns, gaps.rows))


def _overlaps(breakdown: Breakdown) -> Iterator[Html]:
    if breakdown.overlaps:
        overlaps = overlap_table(breakdown, LINES - 1)
        title = f"At the same time, split equally above: {count(len(breakdown.overlaps), 'combination')}"
        yield tag("details", tag("summary", title), table(overlaps.columns, overlaps.rows))
