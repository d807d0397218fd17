"""Counters on the page: a row for each, with a small chart over the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.counters import NOTE, counter_cells, quantity, whose
from stepscope_report.charts.marks import pick_of_each
from stepscope_report.formatting import count, duration
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import percent, section, table
from stepscope_report.section import Page
from stepscope_report.tables.counters import CounterRow, Counters, Piece, pieces_of
from stepscope_report.timeline import Counter

DRAWN = 32
"""Rows of one counter; of more every k-th is shown, and the highest."""
ROWS = 128
"""Rows of all counters, of which each gets its share, and at least four: a row has up to `BARS` bars."""
BARS = 120
"""Bars of one chart: each is the most in its part of the step."""


def draw_counters(counters: Counters | None, page: Page) -> Iterator[Html]:
    """Yield the table of counters. Nothing if none were sampled."""
    if counters is None:
        return
    timeline, window_ns = page.timeline, page.timeline.window.wall_ns
    pieces = [(counter, pieces) for counter in timeline.counters if (pieces := pieces_of(counter, timeline))]
    names = len({row.name for row in counters.rows})
    drawn = DRAWN if len(counters.rows) <= ROWS else min(DRAWN, max(4, ROWS // names))
    shown = list(pick_of_each(counters.rows, lambda row: row.name, lambda row: row.most, drawn))
    grows = any(row.increase is not None for row in counters.rows)
    columns = (
        "counter",
        "of",
        "over the step",
        ">least",
        ">mean",
        ">most",
        *([">in the step"] if grows else []),
    )
    cells = [_cells(counters.rows[at], *pieces[at], page, window_ns)[: len(columns)] for at in shown]
    note = "Each bar is the most in its part of the step, of the most in all of it."
    if grows:
        note += f" {NOTE}"
    if len(shown) < len(counters.rows):
        note += f" {len(shown):,} of {count(len(counters.rows), 'row')} are shown, and the highest of each."
    yield section("counters", "Counters", table(columns, cells, "counter-table"), note=note)


def _cells(
    row: CounterRow, counter: Counter, pieces: Sequence[Piece], page: Page, window_ns: int
) -> tuple[str | Html, ...]:
    name, of, *rest = counter_cells(row)
    if not page.timeline.processes[counter.process].aligned:
        return name, of, "unaligned: not drawn", *rest
    return name, of, _chart(row, pieces, page.timeline.window.start_ns, window_ns), *rest


def _chart(row: CounterRow, pieces: Sequence[Piece], start_ns: int, window_ns: int) -> Html:
    """Return bars. The growth of a total is drawn from 0."""
    first = pieces[0].value if row.increase is not None else 0.0
    heights = _heights(pieces, start_ns, window_ns, first)
    top = max([abs(height) for height in heights.values()], default=0.0) or 1.0
    bars = [
        tag(
            "i",
            class_="m flight",
            style=f"left:{percent(at, BARS)};width:{percent(1.05, BARS)};height:{percent(abs(height), top)}",
            data_t=f"{whose(row)}: {quantity(height, row.unit)} at {duration(window_ns * at // BARS)}",
        )
        for at, height in sorted(heights.items())
        if height
    ]
    return tag("div", *bars, class_="fall curve")


def _heights(pieces: Sequence[Piece], start_ns: int, window_ns: int, first: float) -> dict[int, float]:
    """Return {bar: the most in its part of the step}."""
    heights: dict[int, float] = {}
    for piece in pieces:
        since, until = (
            min(BARS - 1, max(0, (at_ns - start_ns) * BARS // max(window_ns, 1)))
            for at_ns in (piece.start_ns, max(piece.start_ns, piece.end_ns - 1))
        )
        for bar in range(since, until + 1):
            heights[bar] = max(heights.get(bar, piece.value - first), piece.value - first)
    return heights
