"""The balance of a stage over its processes: a map of processes by stage, and the calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stepscope.report.charts.marks import pick
from stepscope.report.formatting import count, duration, middle
from stepscope.report.html.colours import Colours
from stepscope.report.html.markup import Html, join, tag
from stepscope.report.html.page import section, table
from stepscope.report.tables.stages import Stage
from stepscope.report.terminal.sections import say_profiled, starred

NUMBERED = 8
"""Processes up to which each cell holds its number."""
CELLS = 512
"""Cells of a row; of more processes every k-th has one, and the slowest."""
_STEPS = 5
"""Shades on each side of the median: classes `h-5` to `h5`, a step for each tenth."""


def heat(stages: Sequence[Stage], colours: Colours) -> list[Html]:
    """A map for each role that has several processes. Empty where none has."""
    roles: dict[str, list[Stage]] = defaultdict(list)
    for stage in stages:
        if len(stage.processes) > 1:
            roles[stage.role].append(stage)
    if not roles:
        return []
    maps = [part for role, mine in roles.items() for part in _map(role, mine, colours)]
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
    slowest = {stage.slowest for stage in stages}
    drawn = [
        names[at] for at in pick(len(names), CELLS, (i for i, name in enumerate(names) if name in slowest))
    ]
    said = count(len(names), "process") + (f", {len(drawn)} drawn" if len(drawn) < len(names) else "")
    yield tag("h3", role, tag("small", said))
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
    ratio = "-" if stage.imbalance is None else f"{stage.imbalance:.2f}"
    return [
        join(colours.swatch((stage.role, stage.stage)), tag("span", stage.stage)),
        tag("div", *cells, class_="cells"),
        duration(median_ns),
        duration(max(busy.values())),
        tag("b", ratio) if (stage.imbalance or 0) >= 1.2 and not stage.uneven else ratio,
        starred(stage.slowest or "", stage.slowest in profiled),
    ]


def _cell(name: str, busy_ns: int | None, median_ns: int, numbered: bool) -> Html:
    if busy_ns is None:
        return tag("i", class_="cell none", data_t=f"{name}: did not run it")
    ratio = busy_ns / median_ns if median_ns else 1.0
    said = f"{name}: {duration(busy_ns)}, {ratio:.2f} of the median"
    return tag("i", duration(busy_ns) if numbered else "", class_=f"cell {_shade(ratio)}", data_t=said)


def _shade(ratio: float) -> str:
    return f"h{max(-_STEPS, min(_STEPS, round((ratio - 1) * 10)))}"


def calls(stages: Sequence[Stage], colours: Colours) -> Html:
    """Every stage's calls."""
    extra = [name for name in ("open", "errors") if any(getattr(stage, name) for stage in stages)]
    rows = [
        (
            join(colours.swatch((stage.role, stage.stage)), tag("span", f"{stage.role} {stage.stage}")),
            f"{stage.calls:,}", *(str(getattr(stage, name) or "") for name in extra),
            duration(stage.total_ns), duration(stage.mean_ns), duration(stage.p50_ns), duration(stage.max_ns),
        )
        for stage in stages
    ]  # fmt: skip
    columns = ("stage", ">calls", *(f">{name}" for name in extra), ">total", ">mean", ">p50", ">max")
    note = "The total is a sum over calls: of concurrent ones it exceeds the step."
    return section("calls", "Calls", table(columns, rows), note=note)
