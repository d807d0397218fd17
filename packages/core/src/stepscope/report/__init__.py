"""Where a step's time went: pure functions of a timeline that return typed tables, and these as text."""

from stepscope.report.breakdown import Breakdown, Line, Overlap, break_down
from stepscope.report.health import Health, OtherStep, ProcessRow, SpanRow, check_health
from stepscope.report.long_tail import Extreme, LongTail, SlowTrajectory, Spread, Wait, find_long_tail
from stepscope.report.stages import Share, Stage, time_stages
from stepscope.report.step import StepReport, report_step

__all__ = [
    "Breakdown",
    "Extreme",
    "Health",
    "Line",
    "LongTail",
    "OtherStep",
    "Overlap",
    "ProcessRow",
    "Share",
    "SlowTrajectory",
    "SpanRow",
    "Spread",
    "Stage",
    "StepReport",
    "Wait",
    "break_down",
    "check_health",
    "find_long_tail",
    "report_step",
    "time_stages",
]
