"""The balance of a stage over its processes: a map of processes by stage, and the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.stages import CALLS_NOTE, call_columns, ratio, roles_of_several, slowest
from stepscope_report.charts.marks import pick
from stepscope_report.formatting import count, duration, middle, say_profiled, starred
from stepscope_report.html.colours import Colours
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import section, table
from stepscope_report.section import Page
from stepscope_report.tables.stages import Stage

NUMBERED = 8
"""Processes up to which each cell holds its number."""
CELLS = 512
"""Cells of a row; of more processes every k-th has one, and the slowest."""
_STEPS = 5
"""Shades on each side of the median: classes `h-5` to `h5`, a step for each tenth."""


def draw_stages(stages: Sequence[Stage], page: Page) -> Iterator[Html]:
    yield from _heat(stages, page.colours)
    if stages:
        yield _calls(stages, page.colours)


def _heat(stages: Sequence[Stage], colours: Colours) -> list[Html]:
    """Return a map for each role that has several processes. Empty if none has."""
    roles = roles_of_several(stages)
    if not roles:
        return []
    maps = [part for role, group in roles.items() for part in _map(role, group, colours)]
    scale = [tag("i", class_=f"cell {_shade(1 + step / 10)}") for step in range(-_STEPS, _STEPS + 1)]
    key = tag("p", "half the median ", *scale, " 1.5 times and above", class_="legend")
    note = (
        "Busy time of each process in each stage, concurrent calls counted once, against the stage's median."
    )
    profiled = (share.profiled for stage in stages for share in stage.processes)
    note = f"{note} {say_profiled(*profiled)}".rstrip()
    return [section("ranks", "Busy time by process and stage", key, *maps, note=note)]


def _map(role: str, stages: Sequence[Stage], colours: Colours) -> Iterator[Html]:
    names = list(dict.fromkeys(share.process for stage in stages for share in stage.processes))
    busiest = {stage.slowest for stage in stages}
    drawn = [
        names[at] for at in pick(len(names), CELLS, (i for i, name in enumerate(names) if name in busiest))
    ]
    processes = count(len(names), "process") + (f", {len(drawn)} drawn" if len(drawn) < len(names) else "")
    yield tag("h3", role, tag("small", processes))
    rows = [_row(stage, drawn, colours) for stage in stages]
    columns = ("stage", "by rank", ">median", ">max", ">max/median", "slowest")
    yield table(columns, rows, "")


def _row(stage: Stage, names: Sequence[str], colours: Colours) -> list[str | Html]:
    busy = {share.process: share.busy_ns for share in stage.processes}
    median_ns = middle(busy.values())
    profiled = {share.process for share in stage.processes if share.profiled}
    cells = [
        _cell(starred(name, name in profiled), busy.get(name), median_ns, len(names) <= NUMBERED)
        for name in names
    ]
    imbalance = ratio(stage.imbalance)
    return [
        colours.swatched((stage.role, stage.stage), stage.title),
        tag("div", *cells, class_="cells"),
        duration(median_ns),
        duration(max(busy.values())),
        tag("b", imbalance) if (stage.imbalance or 0) >= 1.2 and not stage.uneven else imbalance,
        slowest(stage),
    ]


def _cell(name: str, busy_ns: int | None, median_ns: int, numbered: bool) -> Html:
    if busy_ns is None:
        return tag("i", class_="cell none", data_t=f"{name}: did not run it")
    part = busy_ns / median_ns if median_ns else 1.0
    hover = f"{name}: {duration(busy_ns)}, {part:.2f} of the median"
    return tag("i", duration(busy_ns) if numbered else "", class_=f"cell {_shade(part)}", data_t=hover)


def _shade(part: float) -> str:
    return f"h{max(-_STEPS, min(_STEPS, round((part - 1) * 10)))}"


def _calls(stages: Sequence[Stage], colours: Colours) -> Html:
    columns, cells = call_columns(stages)
    rows = [
        (colours.swatched((stage.role, stage.stage), f"{stage.role} {stage.title}"), *cells(stage))
        for stage in stages
    ]
    return section("calls", "Calls", table(("stage", *columns), rows), note=CALLS_NOTE)
