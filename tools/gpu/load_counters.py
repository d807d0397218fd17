"""The part `counters`: stepscope's GPU counters during a load, compared with nvidia-smi at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from stepscope import ProfileConfig, capture, span
from stepscope_report.timeline import Counter, Timeline, load_step
from tools.gpu import standin_allocator, standin_nvml
from tools.gpu.device import Device
from tools.gpu.machine import uuid
from tools.gpu.results import Record
from tools.gpu.smi import Readings, query

FIELDS = ("utilization.gpu", "memory.used", "memory.reserved", "power.draw", "clocks.sm")
RISING_S = 2.0
"""Seconds at the start of the load that are not compared, because clocks, power and averages still rise."""
MIB = 1 << 20


def run(record: Record, device: Device, folder: Path) -> None:
    smi = device.smi()
    if smi is None:
        record.check("counters", "not compared", "nvidia-smi is not there", source="nvidia-smi", agrees=False)
        return
    gpus = query(smi, ["index", "uuid"])
    index = next((row["index"] for row in gpus if row["uuid"].endswith(uuid(device))), "0")
    config = ProfileConfig.from_mapping(
        {"save_path": str(folder / "run"), "steps": [1], "roles": {"*": {"profiler": "off"}}}
    )
    with ExitStack() as stack:
        held = _held(device, stack)
        with capture(1, config=config, role="actor", rank=0) as opened:
            with Readings(smi, FIELDS, index, 0.4) as readings, span("load", role="actor"):
                start_ns, end_ns = load(device, device.size(9, 3))
            allocated = torch.cuda.memory_allocated()
        opened.result.raise_for_missing(60)
        del held
    assert opened.result.path is not None
    timeline = load_step(opened.result.path)
    record.figure("readings of nvidia-smi", len(readings.rows))
    if readings.error:
        record.note(f"nvidia-smi: {readings.error}")
    counted_ns = start_ns + round(min(RISING_S, (end_ns - start_ns) / 3e9) * 1e9)
    _compare(record, timeline, readings, f"GPU {index}", counted_ns, end_ns)
    (tensors,) = _series(timeline, "torch allocated", "cuda:0").values()
    record.near(
        "torch allocated", tensors[-1] / MIB, allocated / MIB, unit="MiB",
        source="torch.cuda.memory_allocated", within=0.0,
    )  # fmt: skip


def _held(device: Device, stack: ExitStack) -> object:
    """Allocate memory for the duration of the load, and return the object that holds it."""
    if not device.pretend:
        return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    stack.enter_context(standin_nvml.standing_in())
    return stack.enter_context(standin_allocator.standing_in()).allocate(1 << 28)


def load(device: Device, seconds: float) -> tuple[int, int]:
    """Multiply matrices for some seconds without new memory. Return (start, end) in unix ns."""
    size = device.size(8192, 128)
    left = torch.randn(size, size, device=device.torch, dtype=torch.bfloat16)
    product = torch.empty_like(left)
    start_ns, until = time.time_ns(), time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            torch.matmul(left, left, out=product)
        device.synchronize()
    return start_ns, time.time_ns()


def _series(timeline: Timeline, name: str, of: str) -> dict[str, list[float]]:
    return {
        counter.of: list(counter.values)
        for counter in timeline.counters
        if (counter.name, counter.of) == (name, of)
    }


def _compare(
    record: Record, timeline: Timeline, readings: Readings, gpu: str, start_ns: int, end_ns: int
) -> None:
    counters = {counter.name: counter for counter in timeline.counters if counter.of == gpu}
    pairs = (
        ("GPU utilisation", "utilization.gpu", "%", 1.0, 0.0, 10.0),
        ("GPU power", "power.draw", "W", 1.0, 0.15, 0.0),
        ("GPU SM clock", "clocks.sm", "MHz", 1.0, 0.1, 0.0),
    )

    def medians(name: str, field: str) -> tuple[float | None, float | None]:
        return _median(counters.get(name), start_ns, end_ns), readings.median(field, start_ns, end_ns)

    for name, field, unit, scale, within, beyond in pairs:
        ours, theirs = medians(name, field)
        if ours is None or theirs is None:
            # nvidia-smi prints [N/A] if the board lacks the sensor. stepscope must have no value either.
            record.check(
                name, ours, theirs, source="nvidia-smi", agrees=ours is theirs and bool(readings.rows)
            )
        else:
            record.near(
                name, ours / scale, theirs, unit=unit, source="nvidia-smi", within=within, beyond=beyond
            )
    _compare_memory(record, medians, start_ns, readings, end_ns)
    throttled = _median(counters.get("GPU throttled"), start_ns, end_ns)
    record.figure("GPU throttled, median", "not sampled" if throttled is None else throttled)


def _compare_memory(
    record: Record,
    medians: Callable[[str, str], tuple[float | None, float | None]],
    start_ns: int,
    readings: Readings,
    end_ns: int,
) -> None:
    """Compare the used memory. The old NVML call counts memory that the driver reserves as used, too."""
    ours, used = medians("GPU memory", "memory.used")
    reserved = readings.median("memory.reserved", start_ns, end_ns) or 0.0
    if ours is None or used is None:
        record.check("GPU memory", ours, used, source="nvidia-smi", agrees=False)
        return
    with_driver = abs(ours / MIB - used - reserved) < abs(ours / MIB - used)
    record.figure("GPU memory counts what the driver reserves", with_driver)
    record.near(
        "GPU memory",
        ours / MIB,
        used + reserved if with_driver else used,
        unit="MiB",
        source="nvidia-smi",
        within=0.02,
        beyond=64.0,
    )


def _median(counter: Counter | None, start_ns: int, end_ns: int) -> float | None:
    if counter is None:
        return None
    pairs = zip(counter.times_ns, counter.values, strict=True)
    values = [value for at_ns, value in pairs if start_ns <= at_ns <= end_ns]
    return statistics.median(values) if values else None
