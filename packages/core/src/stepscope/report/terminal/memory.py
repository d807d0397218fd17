"""CUDA's memory at its highest, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from stepscope.report.formatting import count, duration, size
from stepscope.report.tables.cuda_memory import CudaMemory
from stepscope.report.terminal.layout import LISTED, table

HELD = 4
"""Snapshots of which it is said what held the memory."""
NOTE = (
    "From the allocator's history. before: allocated before the recording, as weights mostly are. at: of the "
    "most allocated."
)
COLUMNS = ("process", "device", ">allocated", ">reserved", ">at", ">before", "mostly")
HOLDERS = (">bytes", ">blocks", "allocated in", "by")


def cuda_memory(rows: Sequence[CudaMemory]) -> Iterator[RenderableType]:
    """Nothing where no snapshot was taken."""
    if not rows:
        return
    more = f" {count(len(rows) - 2 * LISTED, 'row')} more in --json." if len(rows) > 2 * LISTED else ""
    yield table("CUDA memory at its highest", COLUMNS, map(memory_cells, rows[: 2 * LISTED]), NOTE + more)
    for row in rows[:HELD]:
        yield table(f"Held then: {name_of(row)}", HOLDERS, holder_cells(row), say_memory(row))


def name_of(row: CudaMemory) -> str:
    """`actor 0 cuda:0, update_policy, at an out-of-memory error`."""
    at_oom = "at an out-of-memory error" if row.oom else None
    return ", ".join(filter(None, (f"{row.process} {row.device}", row.window, at_oom)))


def say_memory(row: CudaMemory) -> str:
    """What is special about a snapshot. Empty where nothing is."""
    said = []
    if row.oom and row.oom_bytes is not None:
        said.append(f"CUDA was out of memory when it was asked for {size(row.oom_bytes)}.")
    if row.cut:
        said.append(
            "The history was full: earlier peaks are not known, and `before` holds what its oldest events "
            "told. Raise cuda_memory.max_entries."
        )
    return " ".join(said)


def memory_cells(row: CudaMemory) -> tuple[str, ...]:
    """The cells of one device in one snapshot."""
    first = row.holders[0] if row.holders else None
    most = (
        "" if first is None else f"{size(first.bytes)} {' '.join(filter(None, (first.stage, first.where)))}"
    )
    return (
        row.process + (", out of memory" if row.oom else ""), row.device, size(row.allocated_bytes),
        size(row.reserved_bytes), duration(row.at_ns), size(row.before_bytes), most,
    )  # fmt: skip


def holder_cells(row: CudaMemory) -> list[tuple[str, ...]]:
    """A line for each holder, then what is left."""
    cells = [
        (size(each.bytes), f"{each.blocks:,}", each.stage or "no span", each.where or "no stack kept")
        for each in row.holders
    ]
    rest = ((row.before_bytes, "before the recording"), (row.other_bytes, "others"))
    return [*cells, *((size(number), "", what, "") for number, what in rest if number)]
