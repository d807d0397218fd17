"""Operators, devices and memory of the traces, on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope_report.blocks.traces import (
    DEVICE_NOTE,
    least_busy_first,
    memory_table,
    no_device_list,
    operators_by_role,
    short,
    straggler_table,
    trouble_lists,
)
from stepscope_report.charts.marks import pick
from stepscope_report.formatting import count, duration, percent_of
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import ROWS, draw, percent, section, stacked, table
from stepscope_report.section import Page
from stepscope_report.tables.traces import DeviceRow, OperatorRow, TraceTables

DRAWN = 128
"""Devices with a row of their own; of more, the least busy ones and every k-th have one."""


def draw_traces(traces: TraceTables | None, page: Page) -> Iterator[Html]:
    """Yield operators, devices and memory. Nothing without a trace."""
    if traces is not None and (traces.traces or traces.problems or traces.unread):
        yield section("kernels", "Operators and kernels", *_operators(traces), note=_note(traces))
        yield from _devices_and_memory(traces)


def _note(traces: TraceTables) -> str:
    events = sum(row.events for row in traces.traces)
    return (
        f"From {count(len(traces.traces), 'trace')} with {events:,} events. Sums over calls and processes. "
        "own time: without the operators below. mark: named by a decorator or record_function; its own time "
        "is between operators, in Python or waiting."
    )


def _operators(traces: TraceTables) -> Iterator[Html]:
    columns = ("name", "kind", "own time", ">own time", ">total", ">count", ">mean", ">max", ">processes")
    for role, rows in operators_by_role(traces).items():
        longest_ns = max((row.self_ns for row in rows), default=0)
        yield tag("h3", role)
        yield table(columns, [_operator(row, longest_ns) for row in rows], "")
    yield from map(draw, trouble_lists(traces))


def _operator(row: OperatorRow, longest_ns: int) -> tuple[str | Html, ...]:
    bar = tag("i", class_=f"m w-{row.kind}", style=f"left:0;width:{percent(row.self_ns, longest_ns)}")
    return (
        tag("span", short(row.name, 90), data_t=row.name),
        row.kind,
        tag("div", bar, class_="spread"),
        duration(row.self_ns),
        duration(row.total_ns),
        f"{row.count:,}",
        duration(row.mean_ns),
        duration(row.max_ns),
        f"{row.processes:,}",
    )


def _devices_and_memory(traces: TraceTables) -> Iterator[Html]:
    parts: list[Html] = []
    notes = []
    if traces.devices:
        ordered, order = least_busy_first(traces.devices, ROWS)
        shown = [ordered[at] for at in pick(len(ordered), DRAWN, range(ROWS))]
        parts.append(_devices(shown))
        notes = [order, DEVICE_NOTE]
        if len(shown) < len(ordered):
            notes.append(f"{len(shown):,} are shown: the least busy ones, and others evenly chosen.")
    if traces.stragglers:
        late = straggler_table(traces.stragglers[:DRAWN])
        more = f" The first {DRAWN} of {len(traces.stragglers):,} rows are shown; --json has all."
        cut = len(traces.stragglers) > DRAWN
        parts.append(draw(msgspec.structs.replace(late, note=late.note + more * cut)))
    if traces.without_device:
        parts.append(draw(no_device_list(traces.without_device)))
    if traces.memory:
        title = "Most memory, as torch's allocators counted"
        parts.append(draw(msgspec.structs.replace(memory_table(traces.memory), title=title, note="")))
    if parts:
        yield section("devices", "Devices", *parts, note=" ".join(filter(None, notes)))


def _devices(rows: Sequence[DeviceRow]) -> Html:
    columns = (
        "process", "device", "compute, exposed communication, copies and others", ">recorded", ">busy", ">%",
        ">compute", ">communication", ">exposed", ">copies",
    )  # fmt: skip
    return table(columns, [_device(row) for row in rows], "device-table")


def _device(row: DeviceRow) -> tuple[str | Html, ...]:
    rest_ns = max(0, row.busy_ns - row.compute_ns - row.exposed_ns)
    parts = (("compute", row.compute_ns), ("communication", row.exposed_ns), ("memory", rest_ns))
    bars = ((f"w-{kind}", ns, f"{row.process}: {kind} {duration(ns)}") for kind, ns in parts)
    return (
        row.process, row.device, stacked(bars, row.recorded_ns), duration(row.recorded_ns),
        duration(row.busy_ns), percent_of(row.busy_ns, row.recorded_ns), duration(row.compute_ns),
        duration(row.communication_ns), duration(row.exposed_ns), duration(row.memory_ns),
    )  # fmt: skip
