"""*Weight synchronisation*: its phases, the bytes moved and their speed, and the processes that waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from stepscope_report.accounting import Label, union_ns
from stepscope_report.formatting import duration, percents, size
from stepscope_report.sections import PROCESSES, Section
from stepscope_report.sections.breakdown import BREAKDOWN, Breakdown
from stepscope_report.sections.idle import IDLE, Idle
from stepscope_report.spans import MOVES_WEIGHTS, TRANSFER, above, label_of, placed
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Span, Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Sources

_Way: TypeAlias = "tuple[int, str, str, str | None]"
"""(process, role, stage, bucket) of a transfer. The bucket is None if its calls name no bucket."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One stage that moves weights, over all processes of a role."""

    role: str
    stage: str
    processes: int
    calls: int
    """Number of calls that ended."""
    since_ns: int | None
    """Start of the first call in ns after the capture opened. None if no caller's clock is aligned."""
    active_ns: int
    """Time in ns in which at least one call ran in a process with an aligned clock."""
    max_ns: int | None
    """Duration of the longest call in ns. None if no call ended."""
    bytes: int | None
    """Sum of the attribute `bytes` of the calls. If calls are nested, only the outermost counts. None if no
    call has the attribute."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one process, stage and bucket that state the bytes they moved."""

    process: str
    rank: int | None
    role: str
    stage: str
    bucket: str | None
    calls: int
    bytes: int
    busy_ns: int
    """Time in which at least one call of the transfer ran, in ns."""
    gb_per_s: float | None
    """Speed in 10^9 bytes per second of `busy_ns`. None if `busy_ns` is 0."""


class SyncWait(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was idle while weights moved."""

    process: str
    rank: int | None
    waited_ns: int


class WeightSync(msgspec.Struct, frozen=True, kw_only=True):
    """The weight synchronisation of a step."""

    active_ns: int
    """Time in which at least one call that moves weights ran, in ns."""
    between_ns: int
    """Time in ns between the last call of the trainer and the first call of the engine, in which no span ran
    and the weights were on their way. 0 if there was no such time."""
    phases: tuple[Phase, ...]
    """Phases in order of their start."""
    transfers: Table[Transfer]
    """Transfers by time, the longest first."""
    waits: Table[SyncWait]
    """Processes that waited, the longest wait first."""


def weight_sync(timeline: Timeline, breakdown: Breakdown, idle: Iterable[Idle]) -> WeightSync | None:
    """Return the weight synchronisation of the step, or None if no span moves weights."""
    spans = [span for span in timeline.spans if MOVES_WEIGHTS.search(span.stage)]
    if not spans:
        return None
    phases = (_phase(timeline, label, own) for label, own in grouped(spans, label_of).items())
    return WeightSync(
        active_ns=union_ns(placed(timeline, spans)),
        between_ns=sum(line.wall_ns for line in breakdown.lines if line.stage == TRANSFER),
        phases=tuple(sorted(phases, key=lambda phase: (phase.since_ns or 0, phase.role, phase.stage))),
        transfers=_transfers(timeline, spans),
        waits=Table(sorted(_waits(idle), key=lambda wait: (-wait.waited_ns, wait.process))),
    )


def _phase(timeline: Timeline, label: Label, spans: Sequence[Span]) -> Phase:
    times = [span.dur_ns for span in spans if span.dur_ns is not None]
    starts = [at for span in spans if (at := timeline.since_opening_ns(span)) is not None]
    sizes = [size for span in spans if (size := _bytes(span)) is not None and not _is_inner(timeline, span)]
    return Phase(
        role=label[0],
        stage=label[1],
        processes=len({span.process for span in spans}),
        calls=len(times),
        since_ns=min(starts, default=None),
        active_ns=union_ns(placed(timeline, spans)),
        max_ns=max(times, default=None),
        bytes=sum(sizes) if sizes else None,
    )


def _transfers(timeline: Timeline, spans: Sequence[Span]) -> Table[Transfer]:
    ways: dict[_Way, list[Span]] = defaultdict(list)
    for span in spans:
        if _bytes(span) is not None and not _is_inner(timeline, span, _bucket(span)):
            ways[span.process, span.role, span.stage, _bucket(span)].append(span)
    transfers = (_transfer(timeline, way, own) for way, own in ways.items())
    return Table(sorted(transfers, key=lambda transfer: (-transfer.busy_ns, transfer.process)))


def _transfer(timeline: Timeline, way: _Way, spans: Sequence[Span]) -> Transfer:
    process, role, stage, bucket = way
    size = sum(_bytes(span) or 0 for span in spans)
    busy_ns = union_ns([(span.start_ns, timeline.until_ns(span)) for span in spans])
    return Transfer(
        process=timeline.processes[process].name,
        rank=timeline.processes[process].info.rank,
        role=role,
        stage=stage,
        bucket=bucket,
        calls=len(spans),
        bytes=size,
        busy_ns=busy_ns,
        gb_per_s=size / busy_ns if busy_ns else None,  # bytes per ns
    )


def _waits(idle: Iterable[Idle]) -> Iterator[SyncWait]:
    for row in idle:
        waited_ns = sum(cause.wall_ns for cause in row.causes if cause.kind == "weight sync")
        if waited_ns:
            yield SyncWait(process=row.process, rank=row.rank, waited_ns=waited_ns)


def _bytes(span: Span) -> int | None:
    value = (span.attrs or {}).get("bytes")
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return int(value) if whole and value is not None else None


def _bucket(span: Span) -> str | None:
    value = (span.attrs or {}).get("bucket")
    return None if value is None else str(value)


def _is_inner(timeline: Timeline, span: Span, bucket: str | None = None) -> bool:
    """Return whether the span's bytes are already counted by a call around the span. Only calls of the same
    stage, and of the bucket if one is given, can count them.
    """
    return any(
        label_of(outer) == label_of(span) and bucket in (None, _bucket(outer)) and _bytes(outer) is not None
        for outer in above(timeline, span)
    )


_PHASES = ("role", "stage", ">processes", ">calls", ">starts at", ">active", ">longest", ">bytes", ">GB/s")
_TRANSFERS = ("process", "stage", "bucket", ">calls", ">bytes", ">busy", ">GB/s")


def weight_blocks(sync: WeightSync | None, report: StepReport) -> Iterator[Block]:
    """Yield the phases, the bytes moved by process and bucket, and the processes that waited."""
    if sync is None:
        return
    yield TextTable("Weight synchronisation", _PHASES, tuple(map(_drawn_phase, sync.phases)), _note(sync))
    if sync.transfers:
        rows = tuple(map(_drawn_transfer, sync.transfers))
        yield TextTable("Weights moved, by process and bucket", _TRANSFERS, rows, noun="transfer")
    if sync.waits:
        window_ns = report.breakdown.window_ns
        waits = tuple(
            (wait.process, duration(wait.waited_ns), *percents([wait.waited_ns], window_ns))
            for wait in sync.waits
        )
        yield TextTable("Waited for weights", ("process", ">waited", ">%"), waits, noun="process")


def _drawn_phase(phase: Phase) -> tuple[str, ...]:
    return (
        phase.role,
        phase.stage,
        str(phase.processes),
        f"{phase.calls:,}",
        duration(phase.since_ns),
        duration(phase.active_ns),
        duration(phase.max_ns),
        "-" if phase.bytes is None else size(phase.bytes),
        _rate(None if phase.bytes is None or not phase.active_ns else phase.bytes / phase.active_ns),
    )


def _drawn_transfer(transfer: Transfer) -> tuple[str, ...]:
    return (
        transfer.process,
        f"{transfer.role} {transfer.stage}",
        transfer.bucket or "-",
        f"{transfer.calls:,}",
        size(transfer.bytes),
        duration(transfer.busy_ns),
        _rate(transfer.gb_per_s),
    )


def _rate(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else f"{gb_per_s:.3g}"


def _note(sync: WeightSync) -> str:
    between = (
        f" Between the trainer's and the engine's calls: {duration(sync.between_ns)}."
        if sync.between_ns
        else ""
    )
    unknown = all(phase.bytes is None for phase in sync.phases)
    how = ' Bytes are known if these spans have attrs={"bytes": ...}.' if unknown else ""
    return f"In calls that move weights: {duration(sync.active_ns)}.{between}{how}"


def _weight_sync(sources: Sources) -> WeightSync | None:
    idle: Table[Idle] = sources.value_of(IDLE)
    return weight_sync(sources.timeline, sources.value_of(BREAKDOWN), idle)


WEIGHT_SYNC = Section(
    name="weight_sync",
    title="Weight synchronisation",
    compute=_weight_sync,
    terminal=weight_blocks,
    page=PROCESSES,
)
