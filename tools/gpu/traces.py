"""The part `traces`: kernels in torch traces of both modes, compared with CUDA events and torch.profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from stepscope import ProfileConfig, capture
from stepscope_report import step_report
from stepscope_report.timeline import load_step, load_traces
from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.gpu.trace_files import Work, artifacts, busy_ns, counts, shown, work_in
from tools.gpu.trainer import OwnTimes, Trainer, large

BARE = "bare torch.profiler"
SLACK_MS = 0.5
"""Allowed ms between a stage's own times and the times of its first and last kernel."""


def run(record: Record, device: Device, folder: Path) -> None:
    trainer = large(device)
    for _ in range(3):
        trainer.step()  # warm-up: libraries choose their kernels
    bare = by_hand(trainer, folder / "bare.json")
    bare = by_hand(trainer, folder / "bare.json")  # again, since the first recording started Kineto
    record.figure("kernels of a step", len(bare))
    continuous(record, trainer, folder / "continuous", bare)
    discrete(record, trainer, folder / "discrete", bare)


def by_hand(trainer: Trainer, file: Path) -> list[Work]:
    """Run a step under bare torch.profiler, and return its work on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not trainer.device.pretend:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        trainer.step()
    profile.export_chrome_trace(str(file))
    return work_in(file, trainer.device.work)


def captured(trainer: Trainer, folder: Path, mode: str) -> Path:
    """Run a step in a capture, and return the folder of the step."""
    config = ProfileConfig.from_mapping(
        {"save_path": str(folder), "steps": [1], "mode": mode, "counters": "off"}
    )
    with capture(1, config=config, role="actor", rank=0) as opened:
        trainer.step()
    opened.result.raise_for_missing(60)
    assert opened.result.path is not None
    return opened.result.path


def continuous(record: Record, trainer: Trainer, folder: Path, bare: Sequence[Work]) -> None:
    step = captured(trainer, folder, "continuous")
    files = artifacts(step, "torch_trace")
    record.equal("continuous: stages with a trace of their own", sorted(files), [""], source="the mode")
    works = work_in(files[""], trainer.device.work)
    record.check(
        "continuous: kernels by name",
        shown(works),
        shown(bare),
        source=BARE,
        agrees=bool(works) and counts(works) == counts(bare),
    )
    for own in trainer.own:
        inside = [work for work in works if own.start_ns <= work.start_ns <= own.end_ns]
        _stage(record, trainer.device, f"continuous: {own.stage}", inside, own)
    _report(record, trainer, step, works)


def discrete(record: Record, trainer: Trainer, folder: Path, bare: Sequence[Work]) -> None:
    files = artifacts(captured(trainer, folder, "discrete"), "torch_trace")
    stages = [own.stage for own in trainer.own]
    record.equal(
        "discrete: stages with a trace of their own", sorted(files), sorted(stages), source="the loop"
    )
    works = {stage: work_in(file, trainer.device.work) for stage, file in files.items()}
    total = sum(map(counts, works.values()), start=counts([]))
    record.check(
        "discrete: kernels of all stages by name",
        shown([work for part in works.values() for work in part]),
        shown(bare),
        source=BARE,
        agrees=bool(total) and total == counts(bare),
    )
    for own in trainer.own:
        _stage(record, trainer.device, f"discrete: {own.stage}", works[own.stage], own)


def _stage(record: Record, device: Device, what: str, works: Sequence[Work], own: OwnTimes) -> None:
    """Compare the work of one stage with times that were taken without stepscope."""
    if not works:
        record.check(what, "no kernel", "some", source=device.clock, agrees=False)
        return
    first_ns, last_ns = works[0].start_ns, max(work.end_ns for work in works)
    record.near(
        f"{what}: from its first to its last kernel",
        (last_ns - first_ns) / 1e6,
        own.device_ms,
        unit="ms",
        source=device.clock,
        within=0.1,
        beyond=SLACK_MS,
    )
    early_ms, late_ms = (own.start_ns - first_ns) / 1e6, (last_ns - own.end_ns) / 1e6
    record.check(
        f"{what}: kernels lie inside it",
        f"{max(early_ms, late_ms):.3f} ms outside at most",
        "0.5 ms",
        source="time.time_ns around it",
        agrees=max(early_ms, late_ms) <= SLACK_MS,
    )


def _report(record: Record, trainer: Trainer, step: Path, works: Sequence[Work]) -> None:
    """Compare the report of a step with the events of its trace, and with times taken without stepscope."""
    timeline = load_step(step)
    report = step_report(timeline, load_traces(step, timeline))
    for own in trainer.own:
        (span,) = (span for span in timeline.spans if span.stage == own.stage)
        wall_ms = (own.end_ns - own.start_ns) / 1e6
        record.near(
            f"report: duration of {own.stage}",
            (span.dur_ns or 0) / 1e6,
            wall_ms,
            unit="ms",
            source="time.time_ns around it",
            within=0.05,
            beyond=SLACK_MS,
        )
    assert report.traces is not None
    if trainer.device.pretend:
        record.equal("report: devices", len(report.traces.devices), 0, source="a CPU has none")
        return
    (row,) = report.traces.devices
    record.near(
        "report: GPU busy",
        row.busy_ns / 1e6,
        busy_ns(works) / 1e6,
        unit="ms",
        source="union of kernels in the JSON",
        within=0.001,
        beyond=0.01,
    )
    elapsed_ms = sum(own.device_ms for own in trainer.own)
    record.check(
        "report: GPU busy, in large products",
        f"{row.busy_ns / 1e6:.3f} ms",
        f"{elapsed_ms:.3f} ms elapsed",
        source=trainer.device.clock,
        agrees=0.5 * elapsed_ms <= row.busy_ns / 1e6 <= 1.01 * elapsed_ms,
    )
