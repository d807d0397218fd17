"""The report of one step: typed tables for text, JSON and pictures, and scalars for curves."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec

from stepscope_report.advice import Advice
from stepscope_report.sections.baseline import Baseline
from stepscope_report.sections.batches import Batches
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.sections.cause import Cause
from stepscope_report.sections.collectives import CollectiveRow
from stepscope_report.sections.counters import Counters
from stepscope_report.sections.critical_path import CriticalPath, VainWait
from stepscope_report.sections.cuda_memory import CudaMemory
from stepscope_report.sections.engines import Engine, Phaseless
from stepscope_report.sections.gaps import GapRow
from stepscope_report.sections.health import Health
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.labels import LabelRow
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.requests import Request
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.staleness import Staleness
from stepscope_report.sections.throughput import Throughput
from stepscope_report.sections.traces import TraceTables
from stepscope_report.sections.weight_sync import WeightSync
from stepscope_report.table import Block, Paragraph, grouped


class AddedSection(msgspec.Struct, frozen=True, kw_only=True):
    """A section that another package added."""

    name: str
    title: str
    tables: tuple[Block, ...] = ()
    value: Any = None
    """The computed value; None if the section computes tables instead."""
    failed: str | None = None
    """Reason why the section has no tables, or None if the section did not fail."""

    def blocks(self) -> tuple[Block, ...]:
        """Return the section's tables, or a note that the section failed."""
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
    """Name of the tracer that made all spans, if stepscope recorded nothing. `run_id` then names the spans'
    folder."""
    opened_ns: int
    """Unix time in ns at which the capture opened."""
    cause: Cause | None = None
    """The cause of a slow step, or None if no work that the step waited for took longer than similar work."""
    unexplained_ns: int | None = None
    """Part of the step's excess over its neighbours that no known cause explains, or None without
    neighbours."""
    advice: tuple[Advice, ...]
    """Advice: first alarms, then hints by possible saving, the largest first."""
    breakdown: Breakdown
    critical_path: CriticalPath
    baseline: Baseline | None
    """The uncaptured steps to compare with; None if none is known."""
    compared: tuple[int, ...] = ()
    """Numbers of the captured steps that took less time, and that this step was compared with."""
    stages: tuple[Stage, ...]
    long_tail: LongTail | None
    """The slowest trajectories, or None if no span belongs to a trajectory."""
    staleness: Staleness | None
    """Age of the trajectories, or None if no trajectory is known to be stale."""
    idle: tuple[Idle, ...]
    vain_waits: tuple[VainWait, ...] = ()
    """Waits during which no process did work that could end the wait."""
    engines: tuple[Engine, ...]
    """Replicas that recorded prefill and decode, in a trace or in spans."""
    phaseless: tuple[Phaseless, ...]
    """Processes that generated tokens and are not among `engines`."""
    batches: tuple[Batches, ...] = ()
    """Forward passes by batch size. Empty if no engine noted its passes."""
    requests: tuple[Request, ...] = ()
    """The requests that the noted forward passes served."""
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


_ODD = re.compile(r"[^\w.-]+")


def to_scalars(report: StepReport) -> dict[str, float]:
    """Return numbers by name, as TensorBoard, Weights & Biases and MLflow take them.

    `step/wall_seconds` is the step alone: the sum of `stage/<role>/<stage>_seconds` (each stage's share of
    the wall time), `step/profiler_seconds` (profilers inside the step) and `step/unaccounted_seconds`.
    `capture/opening_seconds` and `capture/closing_seconds` come before and after the step.

    `idle/<role>_seconds` is the mean over the role's processes. `long_tail/rollout_seconds`
    exists if a trajectory ended, and `long_tail/held_seconds` if two did. `uncaptured/p50_seconds` and
    `uncaptured/p90_seconds` describe the uncaptured steps near this step, if any are known.
    `staleness/steps_p50`, `_max`, `staleness/versions_p50` and `_max` count steps and policy versions, if
    trajectories are stale.

    If known, `throughput/rollout_tokens_per_second` and `throughput/train_tokens_per_second` are tokens per
    second of the step, and `mfu/<role>/<stage>` is a fraction of 1.

    `trainer/<name>` are numbers that the trainer has logged for the step so far, in the trainer's own units.

    In names, each character other than letters, digits, `_`, `.` and `-` becomes `-`.
    """
    ns: Counter[str] = Counter(
        {
            "step/wall_seconds": report.breakdown.window_ns,
            "step/profiler_seconds": 0,
            "capture/opening_seconds": report.breakdown.opening_ns,
            "capture/closing_seconds": report.breakdown.closing_ns,
        }
    )
    for line in report.breakdown.lines:
        of = (
            f"stage/{_plain(line.role)}/{_plain(line.stage)}" if line.kind == "stage" else f"step/{line.kind}"
        )
        ns[f"{of}_seconds"] += line.wall_ns
    idle = grouped(report.idle, lambda row: _plain(row.role))
    seconds = {
        f"idle/{role}_seconds": sum(row.idle_ns for row in rows) / len(rows) / 1e9
        for role, rows in idle.items()
    }
    if report.baseline is not None:
        ns["uncaptured/p50_seconds"] = report.baseline.p50_ns
        ns["uncaptured/p90_seconds"] = report.baseline.p90_ns
    stale = report.staleness
    if stale is not None:
        lags = (("steps", stale.steps), ("versions", stale.versions))
        seconds |= {f"staleness/{name}_p50": lag.p50 for name, lag in lags if lag is not None}
        seconds |= {f"staleness/{name}_max": lag.max for name, lag in lags if lag is not None}
    tail = report.long_tail
    if tail is not None and tail.held_ns is not None:
        ns["long_tail/held_seconds"] = tail.held_ns
    if tail is not None and tail.rollout_ns is not None:
        ns["long_tail/rollout_seconds"] = tail.rollout_ns
    seconds |= _throughput(report)
    logged = {f"trainer/{_plain_path(name)}": value for name, value in report.metrics.items()}
    return {name: value / 1e9 for name, value in ns.items()} | seconds | logged


def _throughput(report: StepReport) -> dict[str, float]:
    if report.throughput is None:
        return {}
    rates = {"/".join(filter(None, (rate.phase, rate.role))): rate for rate in report.throughput.rates}
    values = {f"throughput/{_plain_path(name)}_tokens_per_second": rate.per_s for name, rate in rates.items()}
    return values | {
        f"mfu/{_plain(use.role)}/{_plain(use.stage)}": use.mfu
        for use in reversed(report.throughput.uses)
        if use.mfu is not None
    }


def _plain_path(name: str) -> str:
    return "/".join(map(_plain, name.split("/")))


def _plain(name: str | None) -> str:
    return _ODD.sub("-", name or "") or "unnamed"
