"""Reading this process' clocks."""

from __future__ import annotations

import time

from stepscope.files.clock import ClockAnchor

_HAS_RAW = hasattr(time, "CLOCK_MONOTONIC_RAW")


def read_anchor(tries: int = 5) -> ClockAnchor:
    """Read all clocks at one moment. Return the tightest of `tries` readings: a preempted one is wide."""
    return min((_read_once() for _ in range(tries)), key=lambda anchor: anchor.uncertainty_ns)


def _read_once() -> ClockAnchor:
    before = time.monotonic_ns()
    wall = time.time_ns()
    raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) if _HAS_RAW else None
    after = time.monotonic_ns()
    return ClockAnchor(
        wall_ns=wall, mono_ns=(before + after) // 2, raw_ns=raw, uncertainty_ns=(after - before + 1) // 2
    )
