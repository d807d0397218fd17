"""The part `memory`: memory snapshots and out-of-memory errors, compared with torch's own statistics."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from stepscope import ProfileConfig, capture, span
from stepscope.files.cuda_memory import DeviceMemory, read_out_of_memory
from stepscope.files.layout import RunLayout
from stepscope_report import step_report
from stepscope_report.timeline import load_step, load_traces
from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.gpu.standin_allocator import Allocator, standing_in
from tools.gpu.trace_files import artifacts

MB = 1 << 20
BLOCK = 128 * MB
"""Bytes of a request: a multiple of 2 MB, so that the allocator's block has the same size."""
STATISTICS = "torch.cuda's memory statistics"


def run(record: Record, device: Device, folder: Path) -> None:
    with standing_in() if device.pretend else nullcontext() as allocator:
        memory = Memory(allocator)
        memory.take(BLOCK)  # initialize CUDA
        snapshot(record, memory, folder / "window")
        shortage_in_a_window(record, memory, folder / "window")
        shortage_at_any_step(record, memory, folder / "any_step")
    if not device.pretend:
        product = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16) @ torch.ones(
            1024, 1024, device="cuda", dtype=torch.bfloat16
        )
        record.equal("afterwards the GPU computes", product.sum().item(), float(1024**3), source="arithmetic")


class Memory:
    """Memory of the device, or of the stand-in `allocator`."""

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator

    def take(self, size: int) -> object:
        """Allocate `size` bytes, and return the object that holds them.

        Raises:
            torch.OutOfMemoryError: fewer bytes are free.
        """
        if self._allocator is not None:
            return self._allocator.allocate(size)
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def config(folder: Path, **settings: object) -> ProfileConfig:
    roles = {"*": {"ranks": "all"}}
    fields = {"save_path": str(folder), "roles": roles, "counters": "off", **settings}
    return ProfileConfig.from_mapping(fields)


def snapshot(record: Record, memory: Memory, folder: Path) -> None:
    """Record a step that holds eight blocks at its peak. Check its summary, its snapshot and its report."""
    torch.cuda.reset_peak_memory_stats()
    window = config(folder, steps=[1], tool="cuda_memory")
    with capture(1, config=window, role="actor", rank=0) as opened:
        with span("load", role="actor"):
            held = blocks_of(memory, 2)
        with span("update_actor", role="actor"):
            peak = blocks_of(memory, 6)
            del peak
    statistics = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "end_bytes": torch.cuda.memory_allocated(),
        "end_reserved_bytes": torch.cuda.memory_reserved(),
    }
    opened.result.raise_for_missing(60)
    assert opened.result.path is not None
    _compare(record, _summary(opened.result.path), statistics)
    _read_snapshot(record, opened.result.path, statistics["end_reserved_bytes"])
    _read_report(record, opened.result.path)
    del held


def blocks_of(memory: Memory, count: int) -> list[object]:
    """Allocate blocks, with 20 ms of pause before and after: torch and spans use different clocks."""
    time.sleep(0.02)
    blocks = [memory.take(BLOCK) for _ in range(count)]
    time.sleep(0.02)
    return blocks


def _summary(step: Path, *, oom: bool = False) -> DeviceMemory:
    (summary,) = (item for item in load_traces(step, load_step(step)).memory if item.oom == oom)
    return summary.summary.devices[0]


def _compare(record: Record, summary: DeviceMemory, statistics: Mapping[str, int]) -> None:
    for field, value in statistics.items():
        record.near(
            f"summary: {field}",
            getattr(summary, field) / MB,
            value / MB,
            unit="MB",
            source=STATISTICS,
            within=0.0,
            beyond=0.1,
        )


def _read_snapshot(record: Record, step: Path, reserved: int) -> None:
    (file,) = artifacts(step, "cuda_memory_snapshot").values()
    content: dict[str, Any] = pickle.loads(file.read_bytes())  # written by this process
    record.figure("size of a snapshot in kB", file.stat().st_size / 1e3)
    segments = sum(segment["total_size"] for segment in content["segments"])
    record.near(
        "snapshot: all segments", segments / MB, reserved / MB, unit="MB", source=STATISTICS, within=0.0
    )
    taken = [
        event
        for trace in content["device_traces"]
        for event in trace
        if event["action"] == "alloc" and event["size"] == BLOCK
    ]
    record.equal("snapshot: allocations of a block", len(taken), 8, source="the loop")


def _read_report(record: Record, step: Path) -> None:
    timeline = load_step(step)
    report = step_report(timeline, load_traces(step, timeline))
    holders = {holder.stage: holder.bytes // BLOCK for row in report.cuda_memory for holder in row.holders}
    wanted = {"actor load": 2, "actor update_actor": 6}
    record.equal(
        "report: blocks by stage at the peak",
        dict(sorted((str(stage), count) for stage, count in holders.items())),
        wanted,
        source="the loop",
    )


def shortage_in_a_window(record: Record, memory: Memory, folder: Path) -> None:
    """Run out of a limited share of the memory in a captured step, catch the error, and check the record."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + 8 * BLOCK + BLOCK // 2) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    caught, allocated, blocks = "", 0, list[object]()
    window = config(folder, steps=[2], tool="cuda_memory")
    try:
        with capture(2, config=window, role="actor", rank=0) as opened:
            with span("update_actor", role="actor"):
                try:
                    for _ in range(16):
                        blocks.append(memory.take(BLOCK))
                except torch.OutOfMemoryError as error:
                    caught, allocated = type(error).__name__, torch.cuda.memory_allocated()
                blocks.clear()
            memory.take(BLOCK)  # works again
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    opened.result.wait(60)
    assert opened.result.path is not None
    problems = opened.result.problems()
    record.check(
        "in a window: problems of the manifest",
        problems,
        "the out-of-memory error alone",
        source="the loop",
        agrees=len(problems) == 1 and "out-of-memory" in problems[0],
    )
    record.equal("in a window: the error comes through", caught, "OutOfMemoryError", source="the loop")
    summary = _summary(opened.result.path, oom=True)
    record.near(
        "in a window: allocated as memory ran out",
        summary.end_bytes / MB,
        allocated / MB,
        unit="MB",
        source=STATISTICS,
        within=0.0,
        beyond=0.1,
    )
    record.near(
        "in a window: bytes asked for",
        (summary.oom_bytes or 0) / MB,
        BLOCK / MB,
        unit="MB",
        source="the loop",
        within=0.0,
        beyond=2.0,
    )
    kinds = {"cuda_memory_snapshot", "cuda_memory_oom_snapshot"}
    present = {kind for kind in kinds if artifacts(opened.result.path, kind)}
    record.equal("in a window: snapshots", sorted(present), sorted(kinds), source="the folder")


def shortage_at_any_step(record: Record, memory: Memory, folder: Path) -> None:
    """Ask for twice the device's memory in a step that is not captured, and check the record of the error."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    any_step = config(folder, steps=[100], cuda_memory={"oom_any_step": "snapshot"})
    caught = ""
    with capture(7, config=any_step, role="actor", rank=0):
        try:
            memory.take(2 * total)
        except torch.OutOfMemoryError as error:
            caught = type(error).__name__
    record.equal("at any step: the error comes through", caught, "OutOfMemoryError", source="the loop")
    records = read_out_of_memory(RunLayout(folder))
    record.equal("at any step: records", len(records), 1, source="the loop")
    for shortage in records:
        pairs = (
            ("asked", shortage.asked_bytes, 2 * total, "the loop"),
            ("limit", shortage.limit_bytes, total, "torch.cuda.mem_get_info"),
            ("free", shortage.free_bytes, free, "torch.cuda.mem_get_info"),
        )
        for what, ours, theirs, source in pairs:
            record.near(
                f"at any step: bytes {what}",
                ours / MB,
                theirs / MB,
                unit="MB",
                source=source,
                within=0.01,
                beyond=64.0,
            )
        record.equal("at any step: the step", shortage.step, 7, source="the loop")
        record.check(
            "at any step: a snapshot",
            shortage.snapshot or shortage.why_none,
            "a file",
            source="the folder",
            agrees=shortage.snapshot is not None and (RunLayout(folder).oom / shortage.snapshot).exists(),
        )
