"""The captured step beside uncaptured ones: whether it is typical, and what the capture cost."""

from __future__ import annotations

import msgspec

from stepscope.files.uncaptured import comparable
from stepscope_report.accounting import rank_of
from stepscope_report.formatting import middle
from stepscope_report.tables.breakdown import Breakdown
from stepscope_report.tables.health import is_truncated
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.completeness import is_running

ENOUGH = 5
"""Least number of uncaptured steps for a comparison."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of the same loop and kind that were not captured, the nearest ones. Their times are of the step
    alone, as `Breakdown.window_ns` is of the captured one.
    """

    steps: tuple[int, ...]
    """Their numbers. The first one after a capture, during which traces may have been written, is among them
    only where there are fewer than `ALONE` others."""
    alike: bool
    """False if no step near it is of its kind, and `steps` are of other kinds."""
    min_ns: int
    p50_ns: int
    """The median."""
    p90_ns: int
    """By nearest rank: some step's own time."""
    max_ns: int
    longer: int
    """Number of them that took longer than the captured one."""
    next_ns: int | None
    """Time of the first one after this capture. None: it is not known, or was captured."""
    excess_ns: int | None
    """Time of the captured one beyond their median: the profiler inside the step, and chance.
    None: its capture ended before the step did."""
    cost_ns: int | None
    """The same with opening and closing the capture: an estimate of all that it cost. None also for a step
    that the flight recorder wrote, because nothing opened, and if the steps are not `alike`."""


def step_baseline(timeline: Timeline, breakdown: Breakdown) -> Baseline | None:
    """Return the uncaptured steps near this one. None if none is known that compares with it."""
    recorder = None if timeline.manifest is None else timeline.manifest.recorder
    near = [step for step in timeline.uncaptured if recorder is None or step.step != timeline.step]
    used = comparable(near)
    if not used:
        return None
    took = sorted(step.dur_ns for step in used)
    end_ns, p50_ns = timeline.window.end_ns, middle(took)
    after = (
        step.dur_ns
        for step in timeline.uncaptured
        if (step.first if recorder is None else step.step == timeline.step + 1) and step.start_ns >= end_ns
    )
    whole = _whole(timeline)
    return Baseline(
        steps=tuple(step.step for step in used),
        alike=used[0].alike,
        min_ns=took[0],
        p50_ns=p50_ns,
        p90_ns=took[rank_of(90, len(took))],
        max_ns=took[-1],
        longer=sum(ns > breakdown.window_ns for ns in took),
        next_ns=next(after, None),
        excess_ns=breakdown.window_ns - p50_ns if whole else None,
        cost_ns=breakdown.total_ns - p50_ns if whole and recorder is None and used[0].alike else None,
    )


def _whole(timeline: Timeline) -> bool:
    """Return whether the recording lasted as long as the step: no exception and no budget ended it."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    cut = any(part.ended_by is not None or is_truncated(part) for part in parts if part.owner)
    return timeline.window.closed and not cut and not is_running(timeline.manifest)
