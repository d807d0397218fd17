"""The long tail as pictures: how times are spread, and what the slowest trajectories waited for."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.report.formatting import duration, turn
from stepscope.report.html.colours import Colours
from stepscope.report.html.markup import EMPTY, Html, join, tag
from stepscope.report.html.page import percent, section, table
from stepscope.report.tables.long_tail import Extreme, LongTail, SlowTrajectory, Spread
from stepscope.report.tables.staleness import Staleness
from stepscope.report.terminal.sections import (
    name_slow,
    say_bubble,
    say_held,
    say_others,
    say_slowed,
    say_staleness,
    stale_cells,
)


def tail(found: LongTail, colours: Colours) -> Html:
    """Percentiles of each stage inside trajectories, and the ten slowest, each divided."""
    columns = ("stage", ">calls", "p50, p90, p99, max", ">p50", ">p90", ">p99", ">max", "max is")
    spreads = table(columns, [_spread(spread, colours) for spread in found.spreads], "spreads")
    return section("tail", "Long tail", _held(found), spreads, *_slowest(found.worst, colours))


def staleness(found: Staleness) -> Html:
    """Draw how far behind the consumed trajectories were."""
    lags = (("steps", found.steps), ("policy versions", found.versions))
    rows = [
        (name, *(f"{n:,}" for n in (lag.known, lag.p50, lag.p90, lag.max)))
        for name, lag in lags
        if lag is not None
    ]
    shown = table(("behind by", ">trajectories", ">p50", ">p90", ">max"), rows, "staleness-table")
    worst: list[Html] = []
    if found.worst:
        columns = ("trajectory", "begun under", "policy versions", ">steps behind", ">versions behind")
        stalest = table(columns, [stale_cells(row) for row in found.worst], "stalest")
        worst = [tag("h3", "Stalest trajectories"), stalest]
    return section("staleness", "Staleness", tag("p", say_staleness(found), class_="said"), shown, *worst)


def _held(found: LongTail) -> Html:
    said = " ".join(filter(None, (say_held(found), say_bubble(found), say_others(found), say_slowed(found))))
    return tag("p", said, class_="said") if said else EMPTY


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
        join(colours.swatch(label), tag("span", " ".join(label))),
        f"{spread.calls:,}",
        tag("div", body, *marks, class_="spread"),
        *(duration(ns) for _, ns in points),
        _whose(spread.max),
    )


def _slowest(worst: Sequence[SlowTrajectory], colours: Colours) -> list[Html]:
    if not worst:
        return []
    longest_ns = max(slow.wall_ns for slow in worst)
    rows = [_slow(slow, longest_ns, colours) for slow in worst]
    columns = ("trajectory", ">took", ">began at", "what it did or waited for", "the most of it")
    return [tag("h3", "Slowest trajectories"), table(columns, rows, "slowest")]


def _slow(slow: SlowTrajectory, longest_ns: int, colours: Colours) -> tuple[str | Html, ...]:
    return (
        name_slow(slow),
        duration(slow.wall_ns) + (" (open)" if slow.open else ""),
        duration(slow.start_ns),
        _waits(slow, longest_ns, colours),
        ", ".join(f"{wait.stage} {duration(wait.wall_ns)}" for wait in slow.waits[:4]),
    )


def _waits(slow: SlowTrajectory, longest_ns: int, colours: Colours) -> Html:
    bars, at_ns = [], 0
    for wait in slow.waits:
        label = (wait.role, wait.stage)
        place = f"left:{percent(at_ns, longest_ns)};width:{percent(wait.wall_ns, longest_ns)}"
        said = f"{' '.join(label)} {duration(wait.wall_ns)}"
        bars.append(tag("i", class_=f"m {colours.of(label)}", style=place, data_t=said))
        at_ns += wait.wall_ns
    return tag("div", *bars, class_="fall")


def _whose(extreme: Extreme) -> str:
    return turn(extreme.trajectory, extreme.turn)
