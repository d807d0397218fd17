"""The report of one step: typed tables, for people, for scripts (JSON) and for pictures."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope_report.advice.evidence import Advice
from stepscope_report.block import Block, Paragraph
from stepscope_report.sections.baseline import Baseline
from stepscope_report.sections.batches import Batches
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.sections.cause import Cause
from stepscope_report.sections.collectives import CollectiveRow
from stepscope_report.sections.counters import Counters
from stepscope_report.sections.critical_path import CriticalPath
from stepscope_report.sections.cuda_memory import CudaMemory
from stepscope_report.sections.engines import Engine, Phaseless
from stepscope_report.sections.gaps import GapRow
from stepscope_report.sections.health import Health
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.labels import LabelRow
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.operators import TraceTables
from stepscope_report.sections.requests import Request
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.staleness import Staleness
from stepscope_report.sections.throughput import Throughput
from stepscope_report.sections.vain_waits import VainWait
from stepscope_report.sections.weight_sync import WeightSync


class AddedSection(msgspec.Struct, frozen=True, kw_only=True):
    """A section that another package added."""

    name: str
    title: str
    tables: tuple[Block, ...] = ()
    value: Any = None
    """The computed value; None if the section computes its tables."""
    failed: str | None = None
    """The reason why it has no tables, or None if it did not fail."""

    def blocks(self) -> tuple[Block, ...]:
        """Return its tables, or the note that it failed."""
        if self.failed is None:
            return self.tables
        return (Paragraph(f"section {self.name} failed: {self.failed}"),)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one step. All times are integer ns; names end in `_ns`.

    Each section of `stepscope_report.report` fills the field of its name.
    """

    format: int = 1
    step: int
    run_id: str
    runs: tuple[str, ...]
    """The ids of all runs that left something in the step's folder."""
    tracer: str = ""
    """Name of the tracer that made all spans, if stepscope recorded nothing; `run_id` names their folder."""
    opened_ns: int
    """Unix time in ns at which the capture opened."""
    cause: Cause | None = None
    """The culprit that the step waited for and that took longer than its like; None if nothing did."""
    unexplained_ns: int | None = None
    """Part of the step's excess over its neighbours that no stage explains, or None if it has no
    neighbours."""
    advice: tuple[Advice, ...]
    """Advice: alarms first, then the largest possible saving."""
    breakdown: Breakdown
    critical_path: CriticalPath
    baseline: Baseline | None
    """The uncaptured steps to compare with; None if none is known."""
    stages: tuple[Stage, ...]
    long_tail: LongTail | None
    """The slowest trajectories, or None if no span belongs to a trajectory."""
    staleness: Staleness | None
    """Age of the trajectories, or None if none is known to be stale."""
    idle: tuple[Idle, ...]
    vain_waits: tuple[VainWait, ...] = ()
    """Waits during which no process was busy that could have ended them."""
    engines: tuple[Engine, ...]
    """Replicas that recorded prefill and decode, in a trace or in spans."""
    phaseless: tuple[Phaseless, ...]
    """Processes that generated tokens and are not among `engines`."""
    batches: tuple[Batches, ...] = ()
    """Forward passes by batch size. Empty if no engine noted its passes."""
    requests: tuple[Request, ...] = ()
    """The requests that noted passes served."""
    throughput: Throughput | None = None
    """Tokens and FLOPs per second, or None if neither is known."""
    weight_sync: WeightSync | None = None
    """Times of weight syncs, or None if no span moves weights."""
    gaps: tuple[GapRow, ...] = ()
    """Gaps between the kernels of devices, by cause. Empty if no trace has a device."""
    labels: tuple[LabelRow, ...] = ()
    """Time by label, as a tree. Empty if no trace has labels."""
    collectives: tuple[CollectiveRow, ...] = ()
    """Bandwidth of collectives by process group and size. Empty if no trace states sizes."""
    traces: TraceTables | None
    """Tables of the traces, or None if these were not read."""
    cuda_memory: tuple[CudaMemory, ...]
    """Snapshots of CUDA's allocator. Empty if the traces were not read."""
    counters: Counters | None = None
    """Sampled counters, or None if no process sampled any."""
    metrics: dict[str, float] = {}
    """Numbers that the trainer logged for the step."""
    health: Health
    added: tuple[AddedSection, ...] = ()
    """Sections of other packages."""

    @property
    def name(self) -> str:
        """`Step 3 of run 4f0c21aa`, or `OpenTelemetry spans of <folder>`."""
        return (
            f"{self.tracer} spans of {self.run_id}"
            if self.tracer
            else f"Step {self.step} of run {self.run_id}"
        )
