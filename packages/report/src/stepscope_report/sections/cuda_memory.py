"""Peak of CUDA's allocator in each memory snapshot, by stage and source line of the allocations."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.cuda_memory import DeviceMemory
from stepscope_report.formatting import duration, size
from stepscope_report.sections import DEVICES, Section
from stepscope_report.table import Block, Table, TextTable
from stepscope_report.timeline import Span, Timeline
from stepscope_report.timeline.activity.traces import MemoryRecord

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

TOP = 10
"""Number of holders that a row keeps."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of memory at the peak that the same stage and source line allocated."""

    stage: str | None
    """Role and stage of the innermost span of the process at the allocation, such as `actor update_actor`.
    None if no span ran, or if the time of the allocation is unknown."""
    where: str | None
    """Innermost line of the allocation's stack: `model.py:41 forward`. None if the snapshot has no such
    stack."""
    blocks: int
    bytes: int


class CudaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device in one snapshot."""

    process: str
    device: str
    window: str | None
    """The stage that was recorded (discrete mode), or None for the whole capture."""
    oom: bool
    """True if the snapshot was taken because CUDA ran out of memory. `oom_bytes` is then the size that was
    requested."""
    oom_bytes: int | None
    allocated_bytes: int
    """The largest number of bytes allocated at once."""
    reserved_bytes: int
    """Largest number of bytes that the allocator reserved on the device."""
    at_ns: int | None
    """Time of the peak in ns after the capture opened. None if unknown."""
    before_bytes: int
    """Part of the peak that was allocated before the recording began, such as weights and optimizer state."""
    cut: bool
    """True if the recording dropped its oldest events. Earlier peaks are then unknown, and `before_bytes` is
    too large."""
    holders: tuple[Holder, ...]
    """The holders of the largest parts of the peak, the largest first."""
    other_bytes: int
    """Bytes at the peak that are neither in `before_bytes` nor in `holders`."""


def cuda_memory_peaks(timeline: Timeline, records: Sequence[MemoryRecord]) -> Table[CudaMemory]:
    """Return a row for each device of each snapshot: first out-of-memory errors, then the largest peaks."""
    spans: dict[int, _Stack] = {}
    rows = []
    for record in records:
        stack = spans.setdefault(record.process, _Stack(timeline, record.process))
        rows += [_row(timeline, record, device, stack) for device in record.summary.devices]
    return Table(sorted(rows, key=lambda row: (not row.oom, -row.allocated_bytes, row.process)))


def _row(timeline: Timeline, record: MemoryRecord, memory: DeviceMemory, stack: _Stack) -> CudaMemory:
    groups: dict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    for block in memory.blocks:
        where = memory.frames[block.where] if 0 <= block.where < len(memory.frames) else None
        at_ns = None if block.at_us is None else block.at_us * 1000 - record.ahead_ns
        groups[None if at_ns is None else stack.at(at_ns), where].append(block.bytes)
    holders = [
        Holder(stage=stage, where=where, blocks=len(sizes), bytes=sum(sizes))
        for (stage, where), sizes in groups.items()
    ]
    holders.sort(key=lambda holder: (-holder.bytes, holder.stage or "", holder.where or ""))
    process = timeline.processes[record.process]
    known = memory.peak_us is not None and process.aligned
    opened_ns = timeline.window.start_ns
    return CudaMemory(
        process=process.name,
        device=f"cuda:{memory.device}",
        window=record.stage,
        oom=record.oom,
        oom_bytes=memory.oom_bytes if record.oom else None,
        allocated_bytes=memory.peak_bytes,
        reserved_bytes=memory.peak_reserved_bytes,
        at_ns=(memory.peak_us or 0) * 1000 - record.ahead_ns - opened_ns if known else None,
        before_bytes=memory.before_bytes,
        cut=memory.cut,
        holders=tuple(holders[:TOP]),
        other_bytes=memory.other_bytes + sum(holder.bytes for holder in holders[TOP:]),
    )


class _Stack:
    """Lookup of the innermost span of one process at a given time."""

    def __init__(self, timeline: Timeline, process: int) -> None:
        spans = [span for span in timeline.spans if span.process == process]
        points: list[tuple[int, int, Span]] = [(span.start_ns, 1, span) for span in spans]
        points += [(timeline.until_ns(span), 0, span) for span in spans]
        running: dict[int, Span] = {}
        self._times: list[int] = []
        self._labels: list[str | None] = []
        """`_labels[i]` is the innermost label from `_times[i]` on, or None if no span runs then."""
        for at_ns, begins, span in sorted(points, key=lambda point: point[:2]):
            if begins:
                running[id(span)] = span
            else:
                running.pop(id(span), None)
            last = next(reversed(running.values()), None)
            self._times.append(at_ns)
            self._labels.append(None if last is None else f"{last.role} {last.stage}")

    def at(self, at_ns: int) -> str | None:
        place = bisect_right(self._times, at_ns) - 1
        return None if place < 0 else self._labels[place]


HELD = 4
"""Number of snapshots whose holders are listed in a terminal."""
NOTE = (
    "From the allocator's history. before: allocated before the recording, as weights mostly are. at: time "
    "of the peak."
)
COLUMNS = ("process", "device", ">allocated", ">reserved", ">at", ">before", "mostly")
HOLDERS = (">bytes", ">blocks", "allocated in", "by")


def cuda_memory_blocks(rows: Sequence[CudaMemory], report: StepReport) -> Iterator[Block]:
    """Yield the peak of each snapshot, and the holders of its memory. Nothing without a snapshot."""
    if not rows:
        return
    yield TextTable("CUDA memory at its highest", COLUMNS, tuple(map(_cells, rows)), NOTE, noun="row")
    for row in rows[:HELD]:
        yield TextTable(f"Held then: {_name(row)}", HOLDERS, tuple(_holders(row)), _remark(row))


def _name(row: CudaMemory) -> str:
    """Return the name of a row: `actor 0 cuda:0, update_actor, at an out-of-memory error`."""
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
    """Return a table row for each holder. Two more rows follow: memory from before the recording, and memory
    of other holders, if there is any.
    """
    cells = [
        (size(holder.bytes), f"{holder.blocks:,}", holder.stage or "no span", holder.where or "no stack kept")
        for holder in row.holders
    ]
    rest = ((row.before_bytes, "before the recording"), (row.other_bytes, "others"))
    return [*cells, *((size(number), "", what, "") for number, what in rest if number)]


CUDA_MEMORY = Section(
    name="cuda_memory",
    title="CUDA memory at its highest",
    compute=lambda sources: cuda_memory_peaks(
        sources.timeline, () if sources.traces is None else sources.traces.memory
    ),
    terminal=cuda_memory_blocks,
    page=DEVICES,
)
