"""The weight synchronisation as tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import duration, percents, size
from stepscope_report.model import StepReport
from stepscope_report.weights.sync import Phase, Transfer, WeightSync

_PHASES = ("role", "stage", ">processes", ">calls", ">starts at", ">active", ">longest", ">bytes", ">GB/s")
_TRANSFERS = ("process", "stage", "bucket", ">calls", ">bytes", ">busy", ">GB/s")


def weight_blocks(sync: WeightSync | None, report: StepReport) -> Iterator[Block]:
    """Yield the phases, what moved by process and bucket, and the processes that waited."""
    if sync is None:
        return
    yield TextTable("Weight synchronisation", _PHASES, tuple(map(_phase, sync.phases)), _note(sync))
    if sync.transfers:
        rows = tuple(map(_transfer, sync.transfers))
        yield TextTable("Weights moved, by process and bucket", _TRANSFERS, rows, noun="transfer")
    if sync.waits:
        window_ns = report.breakdown.window_ns
        waits = tuple(
            (wait.process, duration(wait.waited_ns), *percents([wait.waited_ns], window_ns))
            for wait in sync.waits
        )
        yield TextTable("Waited for weights", ("process", ">waited", ">%"), waits, noun="process")


def _phase(phase: Phase) -> tuple[str, ...]:
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


def _transfer(transfer: Transfer) -> tuple[str, ...]:
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
    between = f" On their way, without a call: {duration(sync.between_ns)}." if sync.between_ns else ""
    unknown = all(phase.bytes is None for phase in sync.phases)
    how = ' Bytes are those of attrs={"bytes": ...} of these spans.' if unknown else ""
    return f"Active in all: {duration(sync.active_ns)}.{between}{how}"
