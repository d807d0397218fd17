"""The whole report of one step: typed tables, for people (`text`), for scripts (JSON) and for pictures."""

from __future__ import annotations

import msgspec

from stepscope.report.breakdown import Breakdown, break_down
from stepscope.report.health import Health, check_health
from stepscope.report.long_tail import LongTail, find_long_tail
from stepscope.report.stages import Stage, time_stages
from stepscope.timeline import Timeline


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where one step went. All times are integer ns; names end in `_ns`."""

    format: int = 1
    step: int
    run_id: str
    runs: tuple[str, ...]
    """All runs that left something in the step's folder."""
    opened_ns: int
    """When the capture opened, unix ns."""
    breakdown: Breakdown
    stages: tuple[Stage, ...]
    long_tail: LongTail | None
    """None: no span belongs to a trajectory."""
    health: Health


def report_step(timeline: Timeline) -> StepReport:
    """The report of one step. Pure: the same timeline gives the same tables."""
    return StepReport(
        step=timeline.step,
        run_id=timeline.run_id,
        runs=timeline.runs,
        opened_ns=timeline.window.start_ns,
        breakdown=break_down(timeline),
        stages=time_stages(timeline),
        long_tail=find_long_tail(timeline),
        health=check_health(timeline),
    )
