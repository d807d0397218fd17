"""Calls of stages as tables, and the busy time of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import duration, middle, say_profiled, starred
from stepscope_report.model import StepReport
from stepscope_report.table import grouped
from stepscope_report.tables.stages import Stage

SIDE_BY_SIDE = 8
"""Processes that have a column each; more are summed up."""
CALLS_NOTE = "A call includes those below it. The total is a sum: with concurrent calls it exceeds the step."


def stage_blocks(stages: Sequence[Stage], report: StepReport) -> Iterator[Block]:
    """Yield the calls of each stage, and for each role of several processes when these were busy."""
    if stages:
        columns, cells = call_columns(stages)
        rows = tuple((stage.role, stage.title, *cells(stage)) for stage in stages)
        yield TextTable("Calls", ("role", "stage", *columns), rows, CALLS_NOTE)
    for role, group in roles_of_several(stages).items():
        yield _busy_table(role, group)


def call_columns(stages: Sequence[Stage]) -> tuple[tuple[str, ...], Callable[[Stage], tuple[str, ...]]]:
    """Return the columns behind a stage's name, and the function that makes their cells.

    `open`, `errors` and `cancelled` are shown only if some stage has them.
    """
    extra = [
        name for name in ("open", "errors", "cancelled") if any(getattr(stage, name) for stage in stages)
    ]
    columns = (">calls", *(f">{name}" for name in extra), ">total", ">mean", ">p50", ">max")

    def cells(stage: Stage) -> tuple[str, ...]:
        times = (stage.total_ns, stage.mean_ns, stage.p50_ns, stage.max_ns)
        counts = (str(getattr(stage, name) or "") for name in extra)
        return f"{stage.calls:,}", *counts, *map(duration, times)

    return columns, cells


def roles_of_several(stages: Sequence[Stage]) -> Mapping[str, Sequence[Stage]]:
    """Return the stages that several processes have, by role."""
    return grouped((stage for stage in stages if len(stage.processes) > 1), lambda stage: stage.role)


def _busy_table(role: str, stages: Sequence[Stage]) -> TextTable:
    names = dict.fromkeys(share.process for stage in stages for share in stage.processes)
    profiled = {share.process for stage in stages for share in stage.processes if share.profiled}
    title, note = f"Busy time by process: {role}", say_profiled(bool(profiled))
    if len(names) <= SIDE_BY_SIDE:
        heads = (f">{starred(name, name in profiled)}" for name in names)
        rows = tuple(_side_by_side(stage, names) for stage in stages)
        return TextTable(title, ("stage", *heads, ">max/median"), rows, note)
    columns = ("stage", ">processes", ">min", ">median", ">max", ">max/median", "slowest")
    return TextTable(title, columns, tuple(map(_summed, stages)), note)


def _side_by_side(stage: Stage, names: Mapping[str, None]) -> tuple[str, ...]:
    busy = {share.process: share.busy_ns for share in stage.processes}
    return stage.title, *(duration(busy.get(name)) for name in names), ratio(stage.imbalance)


def _summed(stage: Stage) -> tuple[str, ...]:
    busy = sorted(share.busy_ns for share in stage.processes)
    spread = (busy[0], middle(busy), busy[-1])
    return stage.title, str(len(busy)), *map(duration, spread), ratio(stage.imbalance), slowest(stage)


def slowest(stage: Stage) -> str:
    """Return the name of the busiest process."""
    profiled = any(share.profiled for share in stage.processes if share.process == stage.slowest)
    return starred(stage.slowest or "", profiled)


def ratio(value: float | None) -> str:
    """Return `1.23`, or `-` for what is not known."""
    return "-" if value is None else f"{value:.2f}"
