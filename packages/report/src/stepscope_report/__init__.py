"""Tables of a step's time: pure functions of a timeline, and the tables as text.

From a trace to a number on the page: `timeline.step.traces` finds the files,
`timeline.activity.content_reader` reads each into a `TraceContent`, and `tables.traces` adds those up into
the value of the section `traces`. `sections.py` lists the sections, `html.traces` draws this one, and
`cli.pages` writes the page. The other sections begin at the timeline's spans.
"""

from stepscope_report.advice.evidence import Advice, Evidence
from stepscope_report.advice.rules import step_advice
from stepscope_report.advice.settings import SettingChange
from stepscope_report.model import StepReport
from stepscope_report.opened.runs import OpenRun, OpenStep
from stepscope_report.opened.traces import OpenTraces
from stepscope_report.scalars import to_scalars
from stepscope_report.sections import step_report
from stepscope_report.table import Rows, Table
from stepscope_report.tables.baseline import Baseline, step_baseline
from stepscope_report.tables.breakdown import Breakdown, Line, Overlap, step_breakdown
from stepscope_report.tables.counters import CounterRow, Counters, IdleDevice, step_counters
from stepscope_report.tables.cuda_memory import CudaMemory, Holder, cuda_memory_peaks
from stepscope_report.tables.engine import Engine, Load, Phaseless, engine_usage, phaseless_engines
from stepscope_report.tables.health import Health, OtherStep, ProcessRow, SpanRow, step_health
from stepscope_report.tables.idle import Cause, Idle, idle_times
from stepscope_report.tables.long_tail import (
    Bubble,
    Extreme,
    Hold,
    LongTail,
    SlowTrajectory,
    Spread,
    Wait,
    step_long_tail,
)
from stepscope_report.tables.stages import Share, Stage, stage_times
from stepscope_report.tables.staleness import Lag, Staleness, StaleTrajectory, step_staleness
from stepscope_report.tables.traces import (
    DeviceRow,
    MemoryRow,
    NoDevice,
    OperatorRow,
    TraceRow,
    TraceTables,
    device_usage,
    memory_peaks,
    missing_devices,
    operator_times,
    trace_tables,
)
from stepscope_report.tables.waiting import VainWait, waits_in_vain

__all__ = [
    "Advice",
    "Baseline",
    "Breakdown",
    "Bubble",
    "Cause",
    "CounterRow",
    "Counters",
    "CudaMemory",
    "DeviceRow",
    "Engine",
    "Evidence",
    "Extreme",
    "Health",
    "Hold",
    "Holder",
    "Idle",
    "IdleDevice",
    "Lag",
    "Line",
    "Load",
    "LongTail",
    "MemoryRow",
    "NoDevice",
    "OpenRun",
    "OpenStep",
    "OpenTraces",
    "OperatorRow",
    "OtherStep",
    "Overlap",
    "Phaseless",
    "ProcessRow",
    "Rows",
    "SettingChange",
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
    "cuda_memory_peaks",
    "device_usage",
    "engine_usage",
    "idle_times",
    "memory_peaks",
    "missing_devices",
    "operator_times",
    "phaseless_engines",
    "stage_times",
    "step_advice",
    "step_baseline",
    "step_breakdown",
    "step_counters",
    "step_health",
    "step_long_tail",
    "step_report",
    "step_staleness",
    "to_scalars",
    "trace_tables",
    "waits_in_vain",
]
