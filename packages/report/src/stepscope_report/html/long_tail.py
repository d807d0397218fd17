"""The long tail as pictures: the spread of times, and the waits of the slowest trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.long_tail import slow_cells, tail_sentences, waits
from stepscope_report.charts.lanes import pack_trajectories
from stepscope_report.formatting import duration, turn
from stepscope_report.html.colours import Colours
from stepscope_report.html.markup import EMPTY, Html, tag
from stepscope_report.html.page import percent, section, stacked, table
from stepscope_report.html.timecharts import lanes
from stepscope_report.section import Page
from stepscope_report.tables.long_tail import LongTail, SlowTrajectory, Spread


def draw_long_tail(tail: LongTail | None, page: Page) -> Iterator[Html]:
    """Yield the lanes of trajectories, and the long tail. Nothing without a trajectory."""
    if tail is None:
        return
    packed = pack_trajectories(page.timeline, [slow.trajectory for slow in tail.worst])
    if packed is not None:
        yield lanes(packed, page.timeline.window.wall_ns, page.colours)
    yield _spreads(tail, page.colours)


def _spreads(tail: LongTail, colours: Colours) -> Html:
    """Return percentiles of each stage inside trajectories, and the ten slowest, each divided."""
    columns = ("stage", ">calls", "p50, p90, p99, max", ">p50", ">p90", ">p99", ">max", "max is")
    spreads = table(columns, [_spread(spread, colours) for spread in tail.spreads], "spreads")
    sentences = tail_sentences(tail)
    text = tag("p", " ".join(sentences), class_="said") if sentences else EMPTY
    return section("tail", "Long tail", text, spreads, *_slowest(tail.worst, colours))


def _spread(spread: Spread, colours: Colours) -> tuple[str | Html, ...]:
    label, longest_ns = (spread.role, spread.stage), spread.max.ns
    points = (("p50", spread.p50_ns), ("p90", spread.p90_ns), ("p99", spread.p99.ns), ("max", spread.max.ns))
    marks = [
        tag(
            "i",
            class_=f"point {name}",
            style=f"left:{percent(ns, longest_ns)}",
            data_t=f"{name} {duration(ns)}",
        )
        for name, ns in points
    ]
    body = tag(
        "i", class_=f"m {colours.of(label)}", style=f"left:0;width:{percent(spread.p50_ns, longest_ns)}"
    )
    return (
        colours.swatched(label, f"{spread.role} {spread.title}"),
        f"{spread.calls:,}",
        tag("div", body, *marks, class_="spread"),
        *(duration(ns) for _, ns in points),
        turn(spread.max.trajectory, spread.max.turn),
    )


def _slowest(worst: Sequence[SlowTrajectory], colours: Colours) -> list[Html]:
    if not worst:
        return []
    longest_ns = max(slow.wall_ns for slow in worst)
    rows = [_slow(slow, longest_ns, colours) for slow in worst]
    columns = ("trajectory", ">took", ">began at", "what it did or waited for", "the most of it")
    return [tag("h3", "Slowest trajectories"), table(columns, rows, "slowest")]


def _slow(slow: SlowTrajectory, longest_ns: int, colours: Colours) -> tuple[str | Html, ...]:
    parts = (
        (
            colours.of((wait.role, wait.stage)),
            wait.wall_ns,
            f"{wait.role} {wait.title} {duration(wait.wall_ns)}",
        )
        for wait in slow.waits
    )
    return *slow_cells(slow), stacked(parts, longest_ns), waits(slow)
