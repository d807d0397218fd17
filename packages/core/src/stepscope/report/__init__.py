"""Tables of a step's time: pure functions of a timeline, and the tables as text."""

from stepscope.report.advice.evidence import Advice, Evidence
from stepscope.report.advice.rules import advise
from stepscope.report.scalars import to_scalars
from stepscope.report.step import report_step
from stepscope.report.step_report import StepReport
from stepscope.report.table import Table
from stepscope.report.tables.baseline import Baseline, find_baseline
from stepscope.report.tables.breakdown import Breakdown, Line, Overlap, break_down
from stepscope.report.tables.cuda_memory import CudaMemory, Holder, find_holders
from stepscope.report.tables.devices import (
    DeviceRow,
    MemoryRow,
    NoDevice,
    OperatorRow,
    TraceRow,
    TraceTables,
    explain_no_device,
    find_peaks,
    rank_operators,
    tabulate_traces,
    use_devices,
)
from stepscope.report.tables.engine import Engine, Load, Phaseless, find_phaseless, view_engines
from stepscope.report.tables.health import Health, OtherStep, ProcessRow, SpanRow, check_health
from stepscope.report.tables.idle import Cause, Idle, find_idle
from stepscope.report.tables.long_tail import (
    Bubble,
    Extreme,
    Hold,
    LongTail,
    SlowTrajectory,
    Spread,
    Wait,
    find_long_tail,
)
from stepscope.report.tables.stages import Share, Stage, time_stages
from stepscope.report.tables.staleness import Lag, Staleness, StaleTrajectory, find_staleness
from stepscope.report.tables.waiting import VainWait, find_vain_waits

__all__ = [
    "Advice",
    "Baseline",
    "Breakdown",
    "Bubble",
    "Cause",
    "CudaMemory",
    "DeviceRow",
    "Engine",
    "Evidence",
    "Extreme",
    "Health",
    "Hold",
    "Holder",
    "Idle",
    "Lag",
    "Line",
    "Load",
    "LongTail",
    "MemoryRow",
    "NoDevice",
    "OperatorRow",
    "OtherStep",
    "Overlap",
    "Phaseless",
    "ProcessRow",
    "Share",
    "SlowTrajectory",
    "SpanRow",
    "Spread",
    "Stage",
    "StaleTrajectory",
    "Staleness",
    "StepReport",
    "Table",
    "TraceRow",
    "TraceTables",
    "VainWait",
    "Wait",
    "advise",
    "break_down",
    "check_health",
    "explain_no_device",
    "find_baseline",
    "find_holders",
    "find_idle",
    "find_long_tail",
    "find_peaks",
    "find_phaseless",
    "find_staleness",
    "find_vain_waits",
    "rank_operators",
    "report_step",
    "tabulate_traces",
    "time_stages",
    "to_scalars",
    "use_devices",
    "view_engines",
]
