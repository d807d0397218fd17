"""Operators, devices and memory of the traces as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope_report.accounting import rank_of
from stepscope_report.blocks.block import Block, Listing, TextTable
from stepscope_report.formatting import LISTED, duration, percent_of, size
from stepscope_report.model import StepReport
from stepscope_report.table import grouped
from stepscope_report.tables.stragglers import StragglerRow
from stepscope_report.tables.traces import DeviceRow, MemoryRow, NoDevice, OperatorRow, TraceTables

SHOWN = 10
"""Operators of a role that are printed."""
NAME = 60
"""Characters of a kernel's name; in full they fill screens."""
DEVICE_NOTE = "All streams together. Exposed: communication that no computation hides. %: of recorded."


def trace_blocks(traces: TraceTables | None, report: StepReport) -> Iterator[Block]:
    if traces is None:
        return
    for role, rows in operators_by_role(traces).items():
        yield _operators(role, rows)
    if traces.devices:
        yield _devices(traces.devices)
    if traces.stragglers:
        yield straggler_table(traces.stragglers)
    if traces.without_device:
        yield no_device_list(traces.without_device)
    if traces.memory:
        yield memory_table(traces.memory)
    yield from trouble_lists(traces)


def operators_by_role(traces: TraceTables) -> Mapping[str, Sequence[OperatorRow]]:
    """Return the operators of each role: those of devices, then those of the host."""
    roles = grouped(traces.operators, lambda row: row.role)
    return {role: [*on_device(rows), *on_host(rows)] for role, rows in roles.items()}


def on_device(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    return [row for row in rows if row.kind not in ("cpu", "mark")]


def on_host(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    return [row for row in rows if row.kind in ("cpu", "mark")]


def _operators(role: str, rows: Sequence[OperatorRow]) -> TextTable:
    columns = ("name", "kind", ">count", ">own time", ">total", ">mean", ">max")
    shown = (*on_device(rows)[:SHOWN], *on_host(rows)[:SHOWN])
    note = "Sums over calls and processes. mark: named by a decorator; its own time is Python, or waiting."
    marks = any(row.kind == "mark" for row in rows)
    cells = tuple(map(_operator, shown))
    return TextTable(f"Operators and kernels: {role}", columns, cells, note if marks else "")


def _operator(row: OperatorRow) -> tuple[str, ...]:
    times = (row.self_ns, row.total_ns, row.mean_ns, row.max_ns)
    return short(row.name), row.kind, f"{row.count:,}", *map(duration, times)


def _devices(rows: Sequence[DeviceRow]) -> TextTable:
    columns = ("process", "device", ">recorded", ">busy", ">compute", ">exposed communication", ">copies")
    ordered, order = least_busy_first(rows, 2 * LISTED)
    note = f"{order} {DEVICE_NOTE}".lstrip()
    return TextTable("Devices", columns, tuple(map(_device, ordered)), note, noun="device")


def device_lines(rows: Sequence[DeviceRow], most: int) -> Iterator[str]:
    """Yield a sentence for each device, the least busy ones first if there are more than `most`."""
    ordered, _ = least_busy_first(rows, most)
    for row in ordered[:most]:
        process, device, recorded, busy, compute, exposed, copies = _device(row)
        yield (
            f"{process}, {device}, {recorded} recorded: busy {busy}, compute {compute}, "
            f"exposed communication {exposed}, copies {copies}"
        )
    if len(rows) > most:
        yield f"{len(rows) - most:,} others were busier"


def least_busy_first(rows: Sequence[DeviceRow], shown: int) -> tuple[Sequence[DeviceRow], str]:
    """Return devices by the part of their time in which they were busy, and a note with percentiles of it.

    Devices that are all shown stay in their order, without a note.
    """
    if len(rows) <= shown:
        return rows, ""
    ordered = sorted(rows, key=lambda row: row.busy_ns / max(row.recorded_ns, 1))
    spread = _spread([f"{percent_of(row.busy_ns, row.recorded_ns)} %" for row in ordered])
    return ordered, f"Least busy first. Busy: {spread}."


def most_memory_first(rows: Sequence[MemoryRow], shown: int) -> tuple[Sequence[MemoryRow], str]:
    """Return rows of memory, the most allocated first, and a note as `least_busy_first` does."""
    if len(rows) <= shown:
        return rows, ""
    ordered = sorted(rows, key=lambda row: -row.allocated_bytes)
    spread = _spread([size(row.allocated_bytes) for row in reversed(ordered)])
    return ordered, f"Most first. Allocated: {spread}."


def _spread(ascending: Sequence[str]) -> str:
    """Return `p10 40 %, p50 61 %, p90 64 %, most 65 % of 1,024`."""
    points = (f"p{percent} {ascending[rank_of(percent, len(ascending))]}" for percent in (10, 50, 90))
    return f"{', '.join(points)}, most {ascending[-1]}, of {len(ascending):,}"


def _device(row: DeviceRow) -> tuple[str, ...]:
    parts = (
        f"{duration(ns)} {percent_of(ns, row.recorded_ns)} %"
        for ns in (row.busy_ns, row.compute_ns, row.exposed_ns, row.memory_ns)
    )
    return row.process, row.device, duration(row.recorded_ns), *parts


def straggler_table(rows: Sequence[StragglerRow]) -> TextTable:
    """Return who entered collectives last, the one that cost the others most first."""
    columns = ("collective", "process", ">calls", ">last", ">others waited", ">waited")
    note = "last: calls that it entered after all others. others waited: for it, all together."
    return TextTable("Stragglers in collectives", columns, tuple(map(_straggler, rows)), note, noun="row")


def _straggler(row: StragglerRow) -> tuple[str, ...]:
    counts = f"{row.calls:,}", f"{row.last:,}"
    return (
        short(row.collective),
        row.process,
        *counts,
        duration(row.others_waited_ns),
        duration(row.waited_ns),
    )


def no_device_list(rows: Sequence[NoDevice]) -> Listing:
    """Return the processes whose trace has no device, with the likely cause."""
    return Listing("No device activity in a trace", tuple(map(_say_no_device, rows)))


def _say_no_device(row: NoDevice) -> str:
    """Return `actor 0, and 3 more: the configuration records the CPU alone. Fix: ...`."""
    first, *others = row.processes
    names = " and ".join(row.processes) if len(others) < 2 else f"{first}, and {len(others):,} more"
    return f"{names}: {row.cause}" + (f". Fix: {row.fix}" if row.fix else "")


def memory_table(rows: Sequence[MemoryRow]) -> TextTable:
    """Return the most memory that each allocator gave out."""
    columns = ("process", "device", ">allocated", ">reserved", ">of", ">at")
    ordered, order = most_memory_first(rows, 2 * LISTED)
    note = f"{order} As torch's allocators counted. at: of the most allocated.".lstrip()
    return TextTable("Most memory", columns, tuple(map(_memory, ordered)), note, noun="row")


def _memory(row: MemoryRow) -> tuple[str, ...]:
    capacity = "-" if row.capacity_bytes is None else size(row.capacity_bytes)
    held = (size(row.allocated_bytes), size(row.reserved_bytes))
    return row.process, row.device, *held, capacity, duration(row.at_ns)


def trouble_lists(traces: TraceTables) -> Iterator[Listing]:
    """Yield the traces that could not be read, and those that were not."""
    if traces.problems:
        lines = tuple(f"{problem.file}: {problem.what}" for problem in traces.problems)
        yield Listing("Trouble with traces", lines, bad=True)
    if traces.unread:
        yield Listing("Not looked into", tuple(traces.unread))


def short(name: str, most: int = NAME) -> str:
    """Return a kernel's name without the middle of a long one."""
    return name if len(name) <= most else f"{name[: most - 20]}...{name[-17:]}"
