"""What the traces say, on the page: operators and kernels, devices, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stepscope.report.formatting import count, duration, percents, size
from stepscope.report.html.markup import Html, tag
from stepscope.report.html.page import listing, percent, section, table
from stepscope.report.tables.cuda_memory import CudaMemory
from stepscope.report.tables.devices import DeviceRow, OperatorRow, TraceTables
from stepscope.report.terminal.memory import (
    COLUMNS,
    HELD,
    HOLDERS,
    NOTE,
    holder_cells,
    memory_cells,
    name_of,
    say_memory,
)
from stepscope.report.terminal.sections import say_no_device, short


def kernels(found: TraceTables) -> Iterator[Html]:
    """Nothing where there is no trace."""
    if found.traces or found.problems or found.unread:
        yield section("kernels", "Operators and kernels", *_operators(found), note=_note(found))
        yield from _device_parts(found)


def _note(found: TraceTables) -> str:
    events = sum(row.events for row in found.traces)
    return (
        f"From {count(len(found.traces), 'trace')} with {events:,} events. Sums over calls and processes. "
        "own time: without the operators below. mark: named by a decorator or record_function; its own time "
        "is between operators, in Python or waiting."
    )


def _operators(found: TraceTables) -> Iterator[Html]:
    roles: dict[str, list[OperatorRow]] = defaultdict(list)
    for row in found.operators:
        roles[row.role].append(row)
    for role, rows in roles.items():
        on_device = [row for row in rows if row.kind not in ("cpu", "mark")]
        ordered = [*on_device, *(row for row in rows if row.kind in ("cpu", "mark"))]
        longest_ns = max((row.self_ns for row in rows), default=0)
        columns = ("name", "kind", "own time", ">own time", ">total", ">count", ">mean", ">max", ">processes")
        yield tag("h3", role)
        yield table(columns, [_operator(row, longest_ns) for row in ordered], "")
    if found.problems:
        lines = [f"{problem.file}: {problem.what}" for problem in found.problems]
        yield listing("Trouble with traces", lines, "bad")
    if found.unread:
        yield listing("Not looked into", found.unread)


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


def _device_parts(found: TraceTables) -> Iterator[Html]:
    parts: list[Html] = []
    if found.devices:
        parts.append(_devices(found.devices))
    if found.without_device:
        said = [say_no_device(row) for row in found.without_device]
        parts.append(listing("No device activity in a trace", said))
    if found.memory:
        parts += [tag("h3", "Most memory, as torch's allocators counted"), _memory(found)]
    if parts:
        note = "All streams together. Exposed: communication that no computation hides. %: of recorded."
        yield section("devices", "Devices", *parts, note=note if found.devices else "")


def _devices(rows: Sequence[DeviceRow]) -> Html:
    columns = (
        "process", "device", "compute, exposed communication, copies and others", ">recorded", ">busy", ">%",
        ">compute", ">communication", ">exposed", ">copies",
    )  # fmt: skip
    return table(columns, [_device(row) for row in rows], "device-table")


def _device(row: DeviceRow) -> tuple[str | Html, ...]:
    rest_ns = max(0, row.busy_ns - row.compute_ns - row.exposed_ns)
    bars, at_ns = [], 0
    for kind, ns in (("compute", row.compute_ns), ("communication", row.exposed_ns), ("memory", rest_ns)):
        place = f"left:{percent(at_ns, row.recorded_ns)};width:{percent(ns, row.recorded_ns)}"
        bars.append(
            tag("i", class_=f"m w-{kind}", style=place, data_t=f"{row.process}: {kind} {duration(ns)}")
        )
        at_ns += ns
    return (
        row.process, row.device, tag("div", *bars, class_="fall"), duration(row.recorded_ns),
        duration(row.busy_ns), percents([row.busy_ns], row.recorded_ns)[0], duration(row.compute_ns),
        duration(row.communication_ns), duration(row.exposed_ns), duration(row.memory_ns),
    )  # fmt: skip


def cuda_memory(rows: Sequence[CudaMemory]) -> Iterator[Html]:
    """Nothing where no snapshot was taken."""
    if not rows:
        return
    parts = [table(COLUMNS, [memory_cells(row) for row in rows], "cuda-memory-table")]
    for row in rows[:HELD]:
        said = say_memory(row)
        parts.append(tag("h3", f"Held then: {name_of(row)}"))
        parts += [tag("p", said, class_="said bad" if row.oom else "note")] if said else []
        parts.append(table(HOLDERS, holder_cells(row)))
    yield section("cuda-memory", "CUDA memory at its highest", *parts, note=NOTE)


def _memory(found: TraceTables) -> Html:
    rows = [
        (
            row.process, row.device, size(row.allocated_bytes), size(row.reserved_bytes),
            "-" if row.capacity_bytes is None else size(row.capacity_bytes), duration(row.at_ns),
        )
        for row in found.memory
    ]  # fmt: skip
    return table(("process", "device", ">allocated", ">reserved", ">of", ">at"), rows)
