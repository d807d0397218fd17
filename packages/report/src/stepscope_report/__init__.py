"""Timelines and reports of captured steps, as objects, text, HTML pages and JSON.

`open` reads a run, and `step_report` makes the tables of a step. Names are imported at their first use.

From a trace to a number on the page: `timeline.trace_files` finds the files, and
`timeline.activity.content_reader` reads each file into a `TraceContent`. There `Reading._kernels` adds each
kernel's time to the totals of the kernel's name and of its device. `sections.traces` adds the files up
(`operator_times`, `device_usage`) and draws them (`draw_traces`). `report.SECTIONS` lists the sections, and
`Pages` in `cli.report` writes the page. Other sections are computed from the timeline's spans.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope_report.advice import Advice, Evidence, SettingChange
    from stepscope_report.model import StepReport, to_scalars
    from stepscope_report.opened import OpenRun, OpenStep, OpenTraces, open  # noqa: A004  # read as `stepscope_report.open`
    from stepscope_report.report import step_report
    from stepscope_report.sections.advice import step_advice
    from stepscope_report.sections.baseline import Baseline, step_baseline
    from stepscope_report.sections.breakdown import Breakdown, Line, Overlap, step_breakdown
    from stepscope_report.sections.cause import Cause
    from stepscope_report.sections.counters import CounterRow, Counters, IdleDevice, step_counters
    from stepscope_report.sections.critical_path import (
        CriticalPath,
        PathPart,
        PathStage,
        Segment,
        VainWait,
        step_critical_path,
        waits_in_vain,
    )
    from stepscope_report.sections.cuda_memory import CudaMemory, Holder, cuda_memory_peaks
    from stepscope_report.sections.engines import Engine, Load, Phaseless, engine_usage, phaseless_engines
    from stepscope_report.sections.health import Health, OtherStep, ProcessRow, SpanRow, step_health
    from stepscope_report.sections.idle import Idle, IdleCause, idle_times
    from stepscope_report.sections.long_tail import (
        Bubble,
        Extreme,
        Hold,
        LongTail,
        SlowTrajectory,
        Spread,
        Wait,
        step_long_tail,
    )
    from stepscope_report.sections.stages import Share, Stage, stage_times
    from stepscope_report.sections.staleness import Lag, Staleness, StaleTrajectory, step_staleness
    from stepscope_report.sections.traces import (
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
    from stepscope_report.table import Rows, Table

__all__ = [
    "Advice",
    "Baseline",
    "Breakdown",
    "Bubble",
    "Cause",
    "CounterRow",
    "Counters",
    "CriticalPath",
    "CudaMemory",
    "DeviceRow",
    "Engine",
    "Evidence",
    "Extreme",
    "Health",
    "Hold",
    "Holder",
    "Idle",
    "IdleCause",
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
    "PathPart",
    "PathStage",
    "Phaseless",
    "ProcessRow",
    "Rows",
    "Segment",
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
    "open",
    "operator_times",
    "phaseless_engines",
    "stage_times",
    "step_advice",
    "step_baseline",
    "step_breakdown",
    "step_counters",
    "step_critical_path",
    "step_health",
    "step_long_tail",
    "step_report",
    "step_staleness",
    "to_scalars",
    "trace_tables",
    "waits_in_vain",
]

_WHERE = {
    "advice": "Advice Evidence SettingChange",
    "model": "StepReport to_scalars",
    "opened": "OpenRun OpenStep OpenTraces open",
    "report": "step_report",
    "table": "Rows Table",
    "sections.advice": "step_advice",
    "sections.baseline": "Baseline step_baseline",
    "sections.breakdown": "Breakdown Line Overlap step_breakdown",
    "sections.cause": "Cause",
    "sections.counters": "CounterRow Counters IdleDevice step_counters",
    "sections.critical_path": "CriticalPath PathPart PathStage Segment VainWait step_critical_path "
    "waits_in_vain",
    "sections.cuda_memory": "CudaMemory Holder cuda_memory_peaks",
    "sections.engines": "Engine Load Phaseless engine_usage phaseless_engines",
    "sections.health": "Health OtherStep ProcessRow SpanRow step_health",
    "sections.idle": "Idle IdleCause idle_times",
    "sections.long_tail": "Bubble Extreme Hold LongTail SlowTrajectory Spread Wait step_long_tail",
    "sections.stages": "Share Stage stage_times",
    "sections.staleness": "Lag Staleness StaleTrajectory step_staleness",
    "sections.traces": "DeviceRow MemoryRow NoDevice OperatorRow TraceRow TraceTables device_usage "
    "memory_peaks missing_devices operator_times trace_tables",
}
"""{module: its public names}."""
_LATER = {name: module for module, names in _WHERE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value  # a module attribute, so later accesses skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
