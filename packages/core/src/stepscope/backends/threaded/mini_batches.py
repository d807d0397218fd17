"""Phases of mini-batches under a `ScheduleConfig`. Pure: mini-batches are counted as in
`torch.profiler.schedule`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from stepscope.config import ScheduleConfig

Phase: TypeAlias = Literal["off", "warmup", "active"]


class Place(NamedTuple):
    """The phase of one mini-batch, and its cycle (0, 1, 2...)."""

    phase: Phase
    cycle: int


def place(schedule: ScheduleConfig | None, mini_batch: int) -> Place:
    """Return the phase and cycle of mini-batch 0, 1, 2... of a window. Without a schedule, all are active."""
    if schedule is None:
        return Place("active", 0)
    at = mini_batch - schedule.skip_first
    length = schedule.wait + schedule.warmup + schedule.active
    cycle, at = divmod(at, length)
    if cycle < 0 or (schedule.repeat and cycle >= schedule.repeat) or at < schedule.wait:
        return Place("off", max(cycle, 0))
    return Place("warmup" if at < schedule.wait + schedule.warmup else "active", cycle)


def first_active(schedule: ScheduleConfig) -> int:
    """Return the number of the first mini-batch that is recorded."""
    return schedule.skip_first + schedule.wait + schedule.warmup


def cut_short(schedule: ScheduleConfig, mini_batch: int, at: str) -> str:
    """Explain why a recording that ends at `mini_batch` is incomplete. `at` is the schedule's key in the
    configuration.
    """
    length = schedule.wait + schedule.warmup + schedule.active
    done = (mini_batch - first_active(schedule)) % length
    return f"{at}: the window ended after {done} of {schedule.active} active mini-batches"


def never_active(schedule: ScheduleConfig, mini_batch: int, at: str) -> str:
    """Explain why a window that ends at `mini_batch` has recorded nothing."""
    return (
        f"{at} records from mini-batch {first_active(schedule)} on (skip_first + wait + warmup), but "
        f"stepscope.advance() was called {mini_batch} times. Fix: a shorter schedule, or call advance() "
        "after each mini-batch"
    )
