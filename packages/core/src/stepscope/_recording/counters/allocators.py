"""Bytes of torch's caching allocators in this process. Nothing here imports torch or initialises a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepscope._recording.process.hardware import initialised
from stepscope.backends.counters import CounterSource
from stepscope.files.counters import TORCH_RESERVED


class AllocatorBytes(CounterSource):
    """One figure of `memory_stats` for each device on which this process holds memory."""

    unit = "B"
    interval_s = 1.0  # torch makes a dict of 100 figures for it: 0.2 ms

    def __init__(self, name: str, figure: str) -> None:
        self.name = name
        self._figure = figure

    def sample(self) -> Mapping[str, float]:
        return {
            f"{kind}:{device}": float(stats[self._figure])
            for kind, module in initialised()
            for device in range(module.device_count())
            if (stats := module.memory_stats(device)).get("reserved_bytes.all.current")
        }


def allocators() -> Iterator[CounterSource]:
    """Yield the sources: the tensors' bytes, and what the allocators hold for them."""
    yield AllocatorBytes("torch allocated", "allocated_bytes.all.current")
    yield AllocatorBytes(TORCH_RESERVED, "reserved_bytes.all.current")
