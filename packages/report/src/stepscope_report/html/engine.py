"""Engines on the page: the times of each replica, and its load over the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.engines import (
    PHASES,
    REQUESTS_NOTE,
    engine_note,
    engine_times,
    iterations_of,
    name_engine,
    request_table,
    say_phaseless,
    shares_of,
)
from stepscope_report.charts.marks import pick
from stepscope_report.formatting import duration
from stepscope_report.html.colours import Colours
from stepscope_report.html.markup import EMPTY, Html, join, tag
from stepscope_report.html.page import legend, percent, section, stacked, table
from stepscope_report.html.timecharts import axis, zoomed
from stepscope_report.section import Page
from stepscope_report.tables.engine import Engine, Load

CHARTS = 16
"""Replicas whose load is drawn."""
_PARTS = ("decode", "prefill", "queue")
_TIMES = ("replica", "by", "time", ">iterations", ">recorded", *(f">{phase}" for phase in PHASES))


def draw_engines(rows: Sequence[Engine], page: Page) -> Iterator[Html]:
    """Yield the engines, and the names of those without phases."""
    phaseless = page.report.phaseless
    unnamed = tag("p", f"{say_phaseless(phaseless)}.", class_="note") if phaseless else EMPTY
    if rows:
        yield _engines(rows, unnamed, page.report.breakdown.window_ns, page.colours)
    elif phaseless:
        yield section("engines", "Engines", unnamed)


def _engines(rows: Sequence[Engine], unnamed: Html, window_ns: int, colours: Colours) -> Html:
    chart, height = _chart([row for row in rows if row.load], window_ns, colours)
    named = [(_colour(phase, colours), phase) for phase in PHASES]
    times = table(_TIMES, [_times(name_engine(row, rows), row, named) for row in rows], "engine-table")
    asked = request_table(rows)
    requests = table(asked.columns, asked.rows, "engine-requests")
    note = f"{height} {engine_note(rows)} {REQUESTS_NOTE}".lstrip()
    return section("engines", "Engines", chart, legend(named), times, requests, unnamed, note=note)


def _chart(rows: Sequence[Engine], window_ns: int, colours: Colours) -> tuple[Html, str]:
    """Draw the load of some replicas, and say how high it is. Nothing of engines without a load."""
    if not rows:
        return EMPTY, ""
    highest = max(sum(_levels(load)) for row in rows for load in row.load) or 1.0
    busiest = max(range(len(rows)), key=lambda at: rows[at].decode_ns + rows[at].mixed_ns)
    picked = [rows[at] for at in pick(len(rows), CHARTS, [busiest])]
    charts = [_load(row, highest, window_ns, colours) for row in picked]
    body = tag("div", axis(window_ns), *charts, class_="chart", id="engine-load", data_ns=window_ns)
    note = (
        "Height: requests in decode, in prefill, and waiting, on average over each bar, of at most "
        f"{highest:.1f}."
    )
    if len(picked) < len(rows):
        note += f" Drawn are {len(picked)} of {len(rows):,} replicas, evenly chosen, and the busiest."
    return join(colours.legend([("rollout", part) for part in _PARTS]), body), note


def _colour(phase: str, colours: Colours) -> str:
    """Return the class of the stage of that name, so that it looks the same all over the page."""
    stage = "rollout", phase
    return colours.of(stage) if stage in colours.labels else f"e-{phase.split()[0]}"


def _times(name: str, row: Engine, named: Sequence[tuple[str, str]]) -> tuple[str | Html, ...]:
    times = engine_times(row)
    cells = [
        "-" if ns is None else f"{duration(ns)} ({share} %)"
        for ns, share in zip(times, shares_of(row), strict=True)
    ]
    parts = (
        (css, ns, f"{phase} {duration(ns)}") for (css, phase), ns in zip(named, times, strict=True) if ns
    )
    bar = stacked(parts, row.recorded_ns)
    return name, row.source, bar, iterations_of(row), duration(row.recorded_ns), *cells


def _levels(load: Load) -> tuple[float, float, float]:
    return load.decoding, load.prefilling, load.waiting


def _load(row: Engine, top: float, window_ns: int, colours: Colours) -> Html:
    """Return stacked bars, from below: decode, prefill, waiting."""
    bars = []
    width_ns = row.load[1].start_ns - row.load[0].start_ns if len(row.load) > 1 else row.window_ns
    for load in row.load:
        below = 0.0
        hover = f"{load.decoding:g} in decode, {load.prefilling:g} in prefill, {load.waiting:g} waiting"
        for part, level in zip(_PARTS, _levels(load), strict=True):
            if level:
                place = (
                    f"left:{percent(load.start_ns, window_ns)};width:{percent(1.05 * width_ns, window_ns)};"
                    f"bottom:{percent(below, top)};height:{percent(level, top)}"
                )
                bars.append(tag("i", class_=f"m {colours.of(('rollout', part))}", style=place, data_t=hover))
                below += level
    name, track = tag("span", row.replica, class_="name"), zoomed(bars, "track curve")
    return tag("div", name, track, class_="row", style="height:44px")
