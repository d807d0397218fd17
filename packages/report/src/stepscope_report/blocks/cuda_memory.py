"""Peaks of CUDA's memory as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import duration, size
from stepscope_report.model import StepReport
from stepscope_report.tables.cuda_memory import CudaMemory

HELD = 4
"""Snapshots whose holders are listed."""
NOTE = (
    "From the allocator's history. before: allocated before the recording, as weights mostly are. at: of the "
    "most allocated."
)
COLUMNS = ("process", "device", ">allocated", ">reserved", ">at", ">before", "mostly")
HOLDERS = (">bytes", ">blocks", "allocated in", "by")


def cuda_memory_blocks(rows: Sequence[CudaMemory], report: StepReport) -> Iterator[Block]:
    """Yield the peak of each snapshot, and what held the memory then. Nothing without a snapshot."""
    if not rows:
        return
    yield TextTable("CUDA memory at its highest", COLUMNS, tuple(map(_cells, rows)), NOTE, noun="row")
    for row in rows[:HELD]:
        yield TextTable(f"Held then: {_name(row)}", HOLDERS, tuple(_holders(row)), _remark(row))


def _name(row: CudaMemory) -> str:
    """Return `actor 0 cuda:0, update_actor, at an out-of-memory error`."""
    at_oom = "at an out-of-memory error" if row.oom else None
    return ", ".join(filter(None, (f"{row.process} {row.device}", row.window, at_oom)))


def _remark(row: CudaMemory) -> str:
    remarks = []
    if row.oom and row.oom_bytes is not None:
        remarks.append(f"CUDA was out of memory when it was asked for {size(row.oom_bytes)}.")
    if row.cut:
        remarks.append(
            "The history was full: earlier peaks are not known, and `before` holds what its oldest events "
            "told. Raise cuda_memory.max_entries."
        )
    return " ".join(remarks)


def _cells(row: CudaMemory) -> tuple[str, ...]:
    first = row.holders[0] if row.holders else None
    most = (
        "" if first is None else f"{size(first.bytes)} {' '.join(filter(None, (first.stage, first.where)))}"
    )
    return (
        row.process + (", out of memory" if row.oom else ""), row.device, size(row.allocated_bytes),
        size(row.reserved_bytes), duration(row.at_ns), size(row.before_bytes), most,
    )  # fmt: skip


def _holders(row: CudaMemory) -> list[tuple[str, ...]]:
    """Return a row for each holder, then what is left."""
    cells = [
        (size(holder.bytes), f"{holder.blocks:,}", holder.stage or "no span", holder.where or "no stack kept")
        for holder in row.holders
    ]
    rest = ((row.before_bytes, "before the recording"), (row.other_bytes, "others"))
    return [*cells, *((size(number), "", what, "") for number, what in rest if number)]
