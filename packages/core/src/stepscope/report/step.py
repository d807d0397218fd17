"""The whole report of one step: typed tables, for people (`text`), for scripts (JSON) and for pictures."""

from __future__ import annotations

import msgspec

from stepscope.report.tables.advice import Advice, Evidence, advise
from stepscope.report.tables.baseline import Baseline, find_baseline
from stepscope.report.tables.breakdown import Breakdown, break_down
from stepscope.report.tables.cuda_memory import CudaMemory, find_holders
from stepscope.report.tables.devices import TraceTables, tabulate_traces
from stepscope.report.tables.engine import Engine, Phaseless, find_phaseless, view_engines
from stepscope.report.tables.health import Health, check_health, find_cut
from stepscope.report.tables.idle import Idle, find_idle
from stepscope.report.tables.long_tail import LongTail, find_long_tail
from stepscope.report.tables.profiling import find_profiling
from stepscope.report.tables.stages import Stage, time_stages
from stepscope.report.tables.staleness import Staleness, find_staleness
from stepscope.report.tables.waiting import VainWait, find_vain_waits
from stepscope.timeline import Timeline, Traces


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one step. All times are integer ns; names end in `_ns`."""

    format: int = 1
    step: int
    run_id: str
    runs: tuple[str, ...]
    """All runs that left something in the step's folder."""
    opened_ns: int
    """The capture's opening, unix ns."""
    advice: tuple[Advice, ...]
    """Alarms first, then what could save most."""
    breakdown: Breakdown
    baseline: Baseline | None
    """None: no uncaptured step is known to compare it with."""
    stages: tuple[Stage, ...]
    long_tail: LongTail | None
    """None: no span belongs to a trajectory."""
    staleness: Staleness | None
    """None: nothing is stale, or nothing says so."""
    idle: tuple[Idle, ...]
    vain_waits: tuple[VainWait, ...] = ()
    """Waits during which nobody was busy who could have ended them."""
    engines: tuple[Engine, ...]
    """Replicas that recorded prefill and decode, in a trace or in spans."""
    phaseless: tuple[Phaseless, ...]
    """Processes that generated and are not among `engines`."""
    traces: TraceTables | None
    """None: they were not read."""
    cuda_memory: tuple[CudaMemory, ...]
    """Of snapshots of CUDA's allocator, where the traces were read."""
    health: Health


def report_step(timeline: Timeline, traces: Traces | None = None) -> StepReport:
    """The report of one step. Pure: the same timeline and traces give the same tables.

    Args:
        traces: What `load_traces` made of the step's traces. None: the report is of spans alone.
    """
    activities = () if traces is None else traces.activities
    breakdown = break_down(timeline)
    found = Evidence(
        breakdown=breakdown,
        baseline=find_baseline(timeline, breakdown),
        stages=time_stages(timeline),
        long_tail=find_long_tail(timeline),
        idle=find_idle(timeline, activities),
        vain_waits=find_vain_waits(timeline),
        engines=view_engines(timeline, activities),
        traces=None if traces is None else tabulate_traces(traces, timeline.window.start_ns),
        health=check_health(timeline),
        profiling=find_profiling(timeline, activities),
        cut=find_cut(timeline),
        over_budget=find_cut(timeline, by_a_budget=True),
    )
    return StepReport(
        step=timeline.step,
        run_id=timeline.run_id,
        runs=timeline.runs,
        opened_ns=timeline.window.start_ns,
        advice=advise(found),
        breakdown=found.breakdown,
        baseline=found.baseline,
        stages=found.stages,
        long_tail=found.long_tail,
        staleness=find_staleness(timeline),
        idle=found.idle,
        vain_waits=found.vain_waits,
        engines=found.engines,
        phaseless=find_phaseless(timeline, found.engines),
        traces=found.traces,
        cuda_memory=find_holders(timeline, () if traces is None else traces.memory),
        health=found.health,
    )
