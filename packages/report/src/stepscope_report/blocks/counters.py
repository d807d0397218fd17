"""Counters as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import LISTED, count, duration, size
from stepscope_report.model import StepReport
from stepscope_report.table import grouped
from stepscope_report.tables.counters import CounterRow, Counters

COLUMNS = ("counter", "of", ">least", ">mean", ">most", ">in the step")
NOTE = "in the step: what a counter that only grows grew by."


def counter_blocks(counters: Counters | None, report: StepReport) -> Iterator[Block]:
    """Yield a row for each counter, or for many of them the one with the most of each name."""
    if counters is None:
        return
    rows: Sequence[CounterRow] = counters.rows
    names = grouped(rows, lambda row: row.name).values()
    highest = [max(own, key=lambda row: (row.increase or 0, row.most)) for own in names]
    shown = rows if len(rows) <= LISTED else highest
    note = NOTE if any(row.increase is not None for row in shown) else ""
    if len(shown) < len(rows):
        note = f"Of each counter the highest of {count(len(rows), 'row')}. {note}".rstrip()
    columns = COLUMNS if NOTE in note else COLUMNS[:-1]
    cells = tuple(counter_cells(row)[: len(columns)] for row in shown)
    yield TextTable("Counters", columns, cells, note)


def counter_cells(row: CounterRow) -> tuple[str, ...]:
    """Return the cells of `COLUMNS`."""
    values = (row.least, row.mean, row.most)
    grown = "" if row.increase is None else quantity(row.increase, row.unit)
    if row.increase is not None:  # it counts from the start of its process: its level means nothing
        return (row.name, whose(row), "", "", "", grown)
    return (row.name, whose(row), *(quantity(value, row.unit) for value in values), grown)


def whose(row: CounterRow) -> str:
    """Return `actor 0`, `GPU 3 of node-a`, `replica 0`."""
    if row.scope == "host":
        return f"{row.of} of {row.host}" if row.of else row.host
    return f"{row.process}, {row.of}" if row.of else row.process


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: `41.2 %`, `1.2 GB`, `300 ms`, `17`."""
    if unit == "B" and abs(value) < 1e18:
        return size(round(value))
    if unit == "ms" and abs(value) < 1e12:
        return duration(round(value * 1e6))
    number = f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.3g}"
    if unit == "%" and number != "0":
        number = f"{value:.1f}" if abs(value) < 1e6 else number
    return f"{number} {unit}".rstrip()
