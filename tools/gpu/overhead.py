"""The part `overhead`: times of a step in a capture, under bare torch.profiler and without a profiler.

The alternatives take turns in changing order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import torch
from _measure import HAND, OFF, interleaved, ratio_interval

from stepscope import ProfileConfig, capture, flush
from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.gpu.trace_files import artifacts, counts, shown, work_in
from tools.gpu.traces import BARE, by_hand
from tools.gpu.trainer import small

ALONE, CAPTURED, SPANS = "no profiler", "capture", "capture, spans alone"
GOAL = 1.05
SECONDS = 45.0
"""Total time of all rounds on a GPU."""


def run(record: Record, device: Device, folder: Path) -> None:
    trainer = small(device)
    for _ in range(5):
        trainer.step()
    body_ms: dict[str, list[float]] = {name: [] for name in (ALONE, HAND, CAPTURED, SPANS, OFF)}
    numbers = count()

    def timed(name: str, around: Callable[[], AbstractContextManager[object]]) -> Callable[[], float]:
        """Return a function that runs a step in `around()`, and returns the ms with opening and closing.

        The wait for the capture's files is not included.
        """

        def once() -> float:
            device.synchronize()
            began = time.perf_counter()
            with around():
                trainer.step()
            took_ms = (time.perf_counter() - began) * 1000
            body_ms[name].append(sum(own.device_ms for own in trainer.own))
            flush(60)
            return took_ms

        return once

    def captured(**settings: object) -> Callable[[], AbstractContextManager[object]]:
        fields = {"save_path": str(folder / "run"), "steps": "every:1", "counters": "off", **settings}
        made = ProfileConfig.from_mapping({**fields, "budget": {"keep_steps": 2, "free_mb": 0}})
        return lambda: capture(next(numbers), config=made, role="actor", rank=0)

    contenders = {
        ALONE: timed(ALONE, nullcontext),
        HAND: timed(HAND, lambda: Bare(device)),
        CAPTURED: timed(CAPTURED, captured()),
        SPANS: timed(SPANS, captured(roles={"*": {"profiler": "off"}})),
        OFF: timed(OFF, captured(steps=[])),
    }
    began = time.monotonic()
    interleaved(contenders, 1)
    round_s = (time.monotonic() - began) / 2
    rounds = 3 if device.pretend else max(5, min(40, int(SECONDS / round_s)))
    for values in body_ms.values():
        values.clear()
    results = interleaved(contenders, rounds)
    record.figure("rounds", rounds)
    for name, times in results.items():
        record.figure(f"{name}: open, step and close, median ms", statistics.median(times))
        record.figure(f"{name}: step by {device.clock}, median ms", statistics.median(body_ms[name][1:]))
    ratio, low, high = ratio_interval(results[CAPTURED], results[HAND])
    record.figure("capture against by hand", f"{ratio:.3f} (95 %: {low:.3f} to {high:.3f})")
    record.goal("capture against bare torch.profiler", ratio, GOAL)
    bodies = statistics.median(body_ms[CAPTURED][1:]) / statistics.median(body_ms[HAND][1:])
    record.goal("the same, of the step alone", bodies, GOAL)
    off = statistics.median(results[OFF]) / statistics.median(results[ALONE])
    record.goal("a step that is not selected, against no profiler", off, 1.02)
    _same_work(record, device, folder)


class Bare:
    """torch.profiler without stepscope, with the activities of a capture."""

    def __init__(self, device: Device) -> None:
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU] if device.pretend else [kinds.CPU, kinds.CUDA]
        self._profile = torch.profiler.profile(activities=activities)

    def __enter__(self) -> None:
        self._profile.start()

    def __exit__(self, *error: object) -> None:
        self._profile.stop()


def _same_work(record: Record, device: Device, folder: Path) -> None:
    """Check that a capture and bare torch.profiler record the same kernels, so that times are comparable."""
    trainer = small(device)
    for _ in range(3):
        trainer.step()
    bare = by_hand(trainer, folder / "bare.json")
    made = ProfileConfig.from_mapping({"save_path": str(folder / "same"), "steps": [1], "counters": "off"})
    with capture(1, config=made, role="actor", rank=0) as opened:
        trainer.step()
    opened.result.raise_for_missing(60)
    assert opened.result.path is not None
    works = work_in(artifacts(opened.result.path, "torch_trace")[""], device.work)
    record.check(
        "kernels of a captured step by name",
        shown(works),
        shown(bare),
        source=BARE,
        agrees=bool(works) and counts(works) == counts(bare),
    )
    record.near(
        "time of the captured step on the device",
        (max(work.end_ns for work in works) - works[0].start_ns) / 1e6,
        sum(own.device_ms for own in trainer.own),
        unit="ms",
        source=device.clock,
        within=0.1,
        beyond=1.0,
    )
