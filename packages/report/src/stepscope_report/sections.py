"""The sections of a report, in order: terminal, page and JSON follow this list.

A test compares the headings of docs/report.md with it.

A section of another package comes through the entry points `stepscope.report_sections`: see `added`.
"""

from __future__ import annotations

from typing import Any

from stepscope_report.added import added_sections
from stepscope_report.advice.bounds import step_bounds
from stepscope_report.advice.demand import step_demand
from stepscope_report.advice.evidence import Advice, Evidence
from stepscope_report.advice.rules import step_advice
from stepscope_report.advice.settings import step_settings
from stepscope_report.blocks.advice import advice_blocks
from stepscope_report.blocks.breakdown import breakdown_blocks
from stepscope_report.blocks.counters import counter_blocks
from stepscope_report.blocks.cuda_memory import cuda_memory_blocks
from stepscope_report.blocks.engines import engine_blocks
from stepscope_report.blocks.health import health_blocks
from stepscope_report.blocks.idle import idle_blocks
from stepscope_report.blocks.long_tail import long_tail_blocks
from stepscope_report.blocks.metrics import metrics_blocks
from stepscope_report.blocks.stages import stage_blocks
from stepscope_report.blocks.staleness import staleness_blocks
from stepscope_report.blocks.throughput import throughput_blocks
from stepscope_report.blocks.traces import trace_blocks
from stepscope_report.html.advice import draw_advice
from stepscope_report.html.breakdown import draw_breakdown
from stepscope_report.html.counters import draw_counters
from stepscope_report.html.engine import draw_engines
from stepscope_report.html.health import draw_health
from stepscope_report.html.idle import draw_idle
from stepscope_report.html.long_tail import draw_long_tail
from stepscope_report.html.stages import draw_stages
from stepscope_report.html.traces import draw_traces
from stepscope_report.model import StepReport
from stepscope_report.section import Section, Sources
from stepscope_report.table import Table
from stepscope_report.tables.baseline import step_baseline
from stepscope_report.tables.breakdown import Breakdown, step_breakdown
from stepscope_report.tables.counters import step_counters
from stepscope_report.tables.cuda_memory import cuda_memory_peaks
from stepscope_report.tables.engine import Engine, Phaseless, engine_usage, phaseless_engines
from stepscope_report.tables.health import Health, cut_processes, step_health
from stepscope_report.tables.idle import Idle, collectives_of_sync, idle_times
from stepscope_report.tables.long_tail import step_long_tail
from stepscope_report.tables.profiling import step_profilers
from stepscope_report.tables.stages import stage_times
from stepscope_report.tables.staleness import step_staleness
from stepscope_report.tables.traces import TraceTables, trace_tables
from stepscope_report.tables.waiting import waits_in_vain
from stepscope_report.throughput.rates import Throughput, step_throughput
from stepscope_report.timeline import Timeline, Traces
from stepscope_report.weights.drawing import weight_blocks
from stepscope_report.weights.sync import WeightSync, weight_sync
from stepscope_report.whatif.saving import savings_of


def _traces(sources: Sources) -> TraceTables | None:
    traces = sources.traces
    return None if traces is None else trace_tables(traces, sources.timeline.window.start_ns)


def _advice(sources: Sources) -> tuple[Advice, ...]:
    timeline = sources.timeline
    return step_advice(
        Evidence(
            breakdown=sources.value_of(BREAKDOWN),
            baseline=sources.value_of(BASELINE),
            stages=sources.value_of(STAGES),
            long_tail=sources.value_of(LONG_TAIL),
            idle=sources.value_of(IDLE),
            syncing_ns=collectives_of_sync(timeline, sources.activities),
            vain_waits=sources.value_of(VAIN_WAITS),
            engines=sources.value_of(ENGINES),
            traces=sources.value_of(TRACES),
            counters=sources.value_of(COUNTERS),
            health=sources.value_of(HEALTH),
            profiling=step_profilers(timeline, sources.activities),
            bounds=step_bounds(timeline),
            cut=cut_processes(timeline),
            over_budget=cut_processes(timeline, by_a_budget=True),
            demand=step_demand(timeline),
            settings=step_settings(timeline.manifest),
            what_if=savings_of(sources.whole),
            names=sources.names,
        )
    )


def _health(sources: Sources) -> Health:
    return step_health(sources.whole, () if sources.traces is None else sources.traces.problems)


def _phaseless(sources: Sources) -> tuple[Phaseless, ...]:
    engines: Table[Engine] = sources.value_of(ENGINES)
    return phaseless_engines(sources.timeline, engines)


def _throughput(sources: Sources) -> Throughput | None:
    engines: Table[Engine] = sources.value_of(ENGINES)
    return step_throughput(sources.timeline, sources.activities, engines, sources.value_of(COUNTERS))


def _weight_sync(sources: Sources) -> WeightSync | None:
    idle: Table[Idle] = sources.value_of(IDLE)
    return weight_sync(sources.timeline, sources.value_of(BREAKDOWN), idle)


ADVICE = Section(
    name="advice", title="What to do", compute=_advice, terminal=advice_blocks, html=draw_advice, page=0
)
BASELINE = Section(
    name="baseline",  # drawn in the head of the report
    compute=lambda sources: step_baseline(sources.timeline, sources.value_of(BREAKDOWN)),
)
BREAKDOWN: Section[Breakdown] = Section(
    name="breakdown",
    title="Where it went",
    compute=lambda sources: step_breakdown(sources.timeline),
    terminal=breakdown_blocks,
    html=draw_breakdown,
    page=0,
)
STAGES = Section(
    name="stages",
    title="Calls",
    compute=lambda sources: stage_times(sources.timeline),
    terminal=stage_blocks,
    html=draw_stages,
    page=2,
)
IDLE = Section(
    name="idle",
    title="Idle",
    compute=lambda sources: idle_times(sources.timeline, sources.activities),
    terminal=idle_blocks,
    html=draw_idle,
    page=1,
)
VAIN_WAITS = Section(name="vain_waits", compute=lambda sources: waits_in_vain(sources.timeline))
LONG_TAIL = Section(
    name="long_tail",
    title="Long tail",
    compute=lambda sources: step_long_tail(sources.timeline),
    terminal=long_tail_blocks,
    html=draw_long_tail,
    page=0,
)
STALENESS = Section(
    name="staleness",
    title="Staleness",
    compute=lambda sources: step_staleness(sources.timeline),
    terminal=staleness_blocks,
    page=0,
)
ENGINES: Section[Table[Engine]] = Section(
    name="engines",
    title="Engines",
    compute=lambda sources: engine_usage(sources.timeline, sources.activities),
    terminal=engine_blocks,
    html=draw_engines,
    page=0,
)
PHASELESS = Section(
    name="phaseless",  # drawn with the engines
    compute=_phaseless,
)
THROUGHPUT = Section(
    name="throughput",
    title="Throughput",
    compute=_throughput,
    terminal=throughput_blocks,
    page=0,
)
WEIGHT_SYNC = Section(
    name="weight_sync",
    title="Weight synchronisation",
    compute=_weight_sync,
    terminal=weight_blocks,
    page=1,
)
TRACES = Section(
    name="traces",
    title="Operators and kernels",
    compute=_traces,
    terminal=trace_blocks,
    html=draw_traces,
)
CUDA_MEMORY = Section(
    name="cuda_memory",
    title="CUDA memory at its highest",
    compute=lambda sources: cuda_memory_peaks(
        sources.timeline, () if sources.traces is None else sources.traces.memory
    ),
    terminal=cuda_memory_blocks,
)
COUNTERS = Section(
    name="counters",
    title="Counters",
    compute=lambda sources: step_counters(sources.timeline),
    terminal=counter_blocks,
    html=draw_counters,
)
METRICS = Section(
    name="metrics",
    title="Logged by the trainer",
    compute=lambda sources: sources.timeline.metrics,
    terminal=metrics_blocks,
)
HEALTH = Section(
    name="health",
    title="Complete, or not",
    compute=_health,
    terminal=health_blocks,
    html=draw_health,
)

SECTIONS: tuple[Section[Any], ...] = (
    ADVICE,
    BASELINE,
    BREAKDOWN,
    STAGES,
    IDLE,
    VAIN_WAITS,
    LONG_TAIL,
    STALENESS,
    ENGINES,
    PHASELESS,
    THROUGHPUT,
    WEIGHT_SYNC,
    TRACES,
    CUDA_MEMORY,
    COUNTERS,
    METRICS,
    HEALTH,
)


def step_report(timeline: Timeline, traces: Traces | None = None) -> StepReport:
    """Return the report of one step. The same timeline and traces give the same tables.

    Args:
        traces: The step's traces, from `load_traces`. None: the report is of spans alone.
    """
    sources = Sources(timeline, traces)
    return StepReport(
        step=timeline.step,
        run_id=timeline.run_id,
        runs=timeline.runs,
        opened_ns=timeline.window.start_ns,
        added=added_sections(sources),
        **{section.name: sources.value_of(section) for section in SECTIONS},
    )
