"""*Why is the device idle?*: gaps between the device's kernels in traces, by cause, call and source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope_report.formatting import doubt, duration, percent_of, say_doubted
from stepscope_report.sections import DEVICES, Section
from stepscope_report.sections.traces import doubted_processes
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import TraceActivity
from stepscope_report.timeline.activity.device_idle import GapKind

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

REMEDIES: dict[GapKind, str] = {
    "synchronisation": "do without the call, or call it less often: .item(), .cpu(), print of a tensor, "
    "torch.cuda.synchronize(); what must be read can be copied with non_blocking=True and read a step later",
    "data loader": "more workers, prefetch_factor and persistent_workers in the DataLoader",
    "garbage collection": "gc.freeze() after the set-up, and gc.collect() at moments of your choice",
    "compilation": "compile before the measured steps; TORCH_LOGS=recompiles names what changes",
    "memory allocation": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and shapes that repeat",
    "copies": "pinned memory and non_blocking=True for what is copied to the device",
    "collective": "collectives on the device (NCCL), or fewer of them on the CPU",
    "slow launches": "torch.compile, CUDA graphs, fused operators or larger batches: the CPU launches more "
    "slowly than the device runs",
    "no operator": "move what Python does there out of the step, or into another thread; with_stack=True "
    "names it",
    "queued": "look for the stream or event that these kernels wait for, and for work that was not recorded",
}
"""Advice for each cause of gaps."""
_FLOOR = 100
"""A cause has a line in a terminal if at least 1 / `_FLOOR` of the idle time has this cause."""


class GapRow(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps of the devices of one process that have the same cause, call and source line."""

    process: str
    role: str
    kind: GapKind
    call: str
    """The CPU call that the device waited for, with the operator around it. Empty if no call is the cause."""
    place: str
    """Innermost source line of the user's code at the gap. Empty if the trace has no stacks."""
    count: int
    total_ns: int
    longest_ns: int
    doubted: bool = False
    """True if a trace of the process is in doubt, so that its times may be wrong."""


def gap_rows(activities: Sequence[TraceActivity]) -> Table[GapRow]:
    """Return the gaps in order of process, and within a process the largest total time first."""
    doubted = doubted_processes(activities)
    sums: dict[tuple[str, str, GapKind, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for activity in activities:
        for gaps in activity.content.gaps:
            total = sums[activity.name, activity.info.role, gaps.kind, gaps.call, gaps.place]
            total[0] += gaps.count
            total[1] += gaps.total_us
            total[2] = max(total[2], gaps.longest_us)
    rows = (
        GapRow(
            process=process,
            role=role,
            kind=kind,
            call=call,
            place=place,
            count=int(count),
            total_ns=round(total_us * 1000),
            longest_ns=round(longest_us * 1000),
            doubted=process in doubted,
        )
        for (process, role, kind, call, place), (count, total_us, longest_us) in sums.items()
    )
    return Table(sorted(rows, key=lambda row: (row.process, -row.total_ns, row.kind, row.call, row.place)))


class CauseOfGaps(NamedTuple):
    """All gaps with one cause in the processes of one role."""

    role: str
    kind: GapKind
    gaps: int
    total_ns: int
    longest_ns: int
    mostly: GapRow
    """Row with the call and line that have the most time over all processes: the row of the first process."""
    mostly_ns: int
    """Total time of all rows with the call and line of `mostly`."""


def causes_of_gaps(rows: Sequence[GapRow]) -> list[CauseOfGaps]:
    """Return the causes of gaps in order of role, and within a role the cause with the most time first."""
    causes = []
    for (role, kind), own in grouped(rows, lambda row: (row.role, row.kind)).items():
        places = grouped(own, lambda row: (row.call, row.place)).values()
        most = max(places, key=lambda place: sum(row.total_ns for row in place))
        causes.append(
            CauseOfGaps(
                role,
                kind,
                sum(row.count for row in own),
                sum(row.total_ns for row in own),
                max(row.longest_ns for row in own),
                most[0],
                sum(row.total_ns for row in most),
            )
        )
    return sorted(causes, key=lambda cause: (cause.role, -cause.total_ns, cause.kind))


def gap_blocks(rows: Sequence[GapRow], report: StepReport) -> Iterator[Block]:
    """Yield a table of the causes of gaps for each role."""
    columns = ("because", ">idle", ">%", ">gaps", ">longest", "mostly")
    for role, causes in grouped(causes_of_gaps(rows), lambda cause: cause.role).items():
        idle_ns = sum(cause.total_ns for cause in causes)
        shown = [cause for cause in causes if cause.total_ns * _FLOOR >= idle_ns]
        cells = tuple(
            (
                cause.kind,
                duration(cause.total_ns),
                percent_of(cause.total_ns, idle_ns),
                f"{cause.gaps:,}",
                duration(cause.longest_ns),
                where(cause),
            )
            for cause in shown
        )
        note = "From the first to the last event. edges: before the first kernel and after the last one."
        doubted = any(row.doubted for row in rows if row.role == role)
        if shown:
            title = f"Why is the device idle? {doubt(role, doubted)}"
            yield TextTable(title, columns, cells, note + say_doubted([doubted]))


def where(cause: CauseOfGaps) -> str:
    """Return the call and line that caused most of the gaps: `cudaStreamSynchronize in aten::item,
    train.py(41): step`. The time of these gaps is added if other gaps have another call or line. Empty if
    neither call nor line is known.
    """
    parts = [part for part in (cause.mostly.call, cause.mostly.place) if part]
    if not parts:
        return ""
    part = "" if cause.mostly_ns == cause.total_ns else f": {duration(cause.mostly_ns)}"
    return f"{', '.join(parts)}{part}"


GAPS = Section(
    name="gaps",
    title="Why is the device idle?",
    compute=lambda sources: gap_rows(sources.activities),
    terminal=gap_blocks,
    page=DEVICES,
)
