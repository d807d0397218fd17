"""Idle time as pictures: a bar for each process, from busy to idle by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from stepscope_report.blocks.idle import name_causes, say_collectives
from stepscope_report.charts.marks import pick_of_each
from stepscope_report.formatting import count, duration, percent_of, say_profiled, starred
from stepscope_report.html.markup import Html
from stepscope_report.html.page import legend, section, stacked, table
from stepscope_report.section import Page
from stepscope_report.tables.idle import Idle, IdleKind

DRAWN = 128
"""Processes of a role with a row of their own; of more every k-th has one, and the most idle."""
_KINDS: tuple[IdleKind, ...] = get_args(IdleKind)


def draw_idle(rows: Sequence[Idle], page: Page) -> Iterator[Html]:
    """Yield a bar for each process, from busy to idle by cause."""
    window_ns = page.report.breakdown.window_ns
    if not rows or not window_ns:
        return
    key = legend((_class(kind), kind) for kind in ("busy", *_KINDS))
    columns = ("process", "busy, then what it probably waited for", ">busy", ">idle", ">%", "the most of it")
    shown = [rows[at] for at in pick_of_each(rows, lambda row: row.role, lambda row: row.idle_ns, DRAWN)]
    collectives = any(row.collective_ns is not None for row in shown)
    cells = [_row(row, window_ns, collectives) for row in shown]
    note = (
        "The likely cause is what others did while a process did nothing. slowest rank: others of its role "
        "were still in a stage that it has a part in."
    )
    if collectives:
        note += " In collectives: of its busy time, by its trace, with no computation beside it."
    note = f"{note} {say_profiled(*(row.profiled for row in shown))}".rstrip()
    if len(shown) < len(rows):
        note += f" {len(shown):,} of {count(len(rows), 'process')} are shown, and the most idle of each role."
    head = (*columns, "in collectives") if collectives else columns
    yield section("idle", "Idle, and why", key, table(head, cells, "idle-table"), note=note)


def _row(row: Idle, window_ns: int, collectives: bool) -> tuple[str | Html, ...]:
    parts: Counter[str] = Counter({"busy": row.busy_ns})
    for cause in row.causes:
        parts[cause.kind] += cause.wall_ns
    bars = (
        (_class(kind), parts[kind], f"{row.process}: {kind} {duration(parts[kind])}")
        for kind in ("busy", *_KINDS)
        if parts[kind]
    )
    cells = (
        starred(row.process, row.profiled),
        stacked(bars, window_ns),
        duration(row.busy_ns),
        duration(row.idle_ns),
        percent_of(row.idle_ns, window_ns),
        ", ".join(name_causes(row, most=2)[0]),
    )
    return (*cells, say_collectives(row)) if collectives else cells


def _class(kind: str) -> str:
    return "k-" + kind.replace(" ", "-")
