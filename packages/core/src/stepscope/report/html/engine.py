"""Engines on the page: what each replica did, and its load over the step's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.engine import Engine, Load, Phaseless
from stepscope.report.figures import duration, percents
from stepscope.report.html.colours import Colours
from stepscope.report.html.markup import EMPTY, Html, tag
from stepscope.report.html.page import percent, section, table
from stepscope.report.html.timecharts import axis
from stepscope.report.marks import pick
from stepscope.report.sections_text import say_phaseless

CHARTS = 16
"""Replicas whose load is drawn."""
_PARTS = ("decode", "prefill", "queue")


def engines(
    rows: Sequence[Engine], phaseless: Sequence[Phaseless], window_ns: int, colours: Colours
) -> Iterator[Html]:
    unsaid = tag("p", f"{say_phaseless(phaseless)}.", class_="note") if phaseless else EMPTY
    if rows:
        yield _engines(rows, unsaid, window_ns, colours)
    elif phaseless:
        yield section("engines", "Engines", unsaid)


def _engines(rows: Sequence[Engine], unsaid: Html, window_ns: int, colours: Colours) -> Html:
    tops = {row.source: _top(rows, row.source) for row in rows}
    busiest = max(range(len(rows)), key=lambda at: rows[at].decode_ns + rows[at].both_ns)
    drawn = [rows[at] for at in pick(len(rows), CHARTS, [busiest])]
    charts = [_load(row, tops[row.source], window_ns, colours) for row in drawn]
    body = tag("div", axis(window_ns), *charts, class_="chart", id="engine-load", data_ns=window_ns)
    named = any(row.iterations is not None for row in rows)
    columns = (
        "replica", "by", "prefill, both, decode", ">prefill alone", ">both", ">decode alone", ">batch",
        ">most", *((">iterations", ">prompt tokens") if named else ()),
    )  # fmt: skip
    highest = " and ".join(f"{top:.1f} ({source})" for source, top in tops.items())
    note = (
        "Height: requests in decode, in prefill, and waiting, on average over each bar, of at most "
        f"{highest}. By the iterations that an engine's trace names, or by the spans of its requests. "
        "batch: requests in decode at once, on average while there were any."
    )
    if len(drawn) < len(rows):
        note += f" Drawn are {len(drawn)} of {len(rows):,} replicas, evenly chosen, and the busiest."
    legend = colours.legend([("rollout", part) for part in _PARTS])
    cells = [_row(row, colours, named) for row in rows]
    shown = table(columns, cells, "engine-table")
    return section("engines", "Engines", legend, body, shown, unsaid, note=note)


def _row(row: Engine, colours: Colours, named: bool) -> tuple[str | Html, ...]:
    times = (row.prefill_ns, row.both_ns, row.decode_ns)
    bars, at_ns = [], 0
    for ns, kind in zip(times, ("prefill", "both", "decode"), strict=True):
        place = f"left:{percent(at_ns, row.window_ns)};width:{percent(ns, row.window_ns)}"
        colour = kind if kind == "both" else colours.of(("rollout", kind))
        bars.append(tag("i", class_=f"m {colour}", style=place, data_t=f"{kind} {duration(ns)}"))
        at_ns += ns
    return (
        row.replica,
        row.source,
        tag("div", *bars, class_="fall"),
        *(f"{duration(ns)} ({percents([ns], row.window_ns)[0]} %)" for ns in times),
        f"{row.decoding:g}",
        str(row.most_decoding),
        *((_number(row.iterations), _number(row.prefill_tokens)) if named else ()),
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _top(rows: Sequence[Engine], source: str) -> float:
    """The highest bar of any replica, so that they can be compared."""
    loads = (load for row in rows if row.source == source for load in row.load)
    return max((sum(_levels(load)) for load in loads), default=0.0) or 1.0


def _levels(load: Load) -> tuple[float, float, float]:
    return load.decoding, load.prefilling, load.waiting


def _load(row: Engine, top: float, window_ns: int, colours: Colours) -> Html:
    """Stacked bars, from below: decode, prefill, waiting."""
    bars = []
    width_ns = row.load[1].start_ns - row.load[0].start_ns if len(row.load) > 1 else row.window_ns
    for load in row.load:
        below = 0.0
        said = f"{load.decoding:g} in decode, {load.prefilling:g} in prefill, {load.waiting:g} waiting"
        for part, level in zip(_PARTS, _levels(load), strict=True):
            if level:
                place = (
                    f"left:{percent(load.start_ns, window_ns)};width:{percent(1.05 * width_ns, window_ns)};"
                    f"bottom:{percent(below, top)};height:{percent(level, top)}"
                )
                bars.append(tag("i", class_=f"m {colours.of(('rollout', part))}", style=place, data_t=said))
                below += level
    track = tag("div", tag("div", *bars, class_="zoom"), class_="track curve")
    return tag(
        "div",
        tag("span", f"{row.replica}, {row.source}", class_="name"),
        track,
        class_="row",
        style="height:44px",
    )
