"""The figures that rules of advice use, and the advice that they give."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import KV_CACHE, RUNNING_REQUESTS, WAITING_REQUESTS
from stepscope.files.manifest.records import FrameworkSettings, Manifest, Setting
from stepscope_report.formatting import duration, percent_of
from stepscope_report.profiling import Profiling
from stepscope_report.sections.baseline import Baseline
from stepscope_report.sections.batches import Batches
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.sections.cause import OtherCause
from stepscope_report.sections.counters import CounterRow, Counters
from stepscope_report.sections.critical_path import CriticalPath
from stepscope_report.sections.engines import Engine
from stepscope_report.sections.health import Health
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.operators import MemoryRow, TraceTables
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.vain_waits import VainWait
from stepscope_report.spans import ManyNames, is_tool, placed
from stepscope_report.table import Table
from stepscope_report.timeline import Timeline
from stepscope_report.whatif.limits import peak
from stepscope_report.whatif.prediction import WhatIf, no_saving

FULL = 95
"""A KV cache counts as full from this percentage on."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand of one step. A number is None if nothing recorded tells it."""

    fitting_requests: int | None = None
    """Number of requests that ran in a replica while its KV cache was full: the median of its samples, and
    the least of the replicas."""
    requests_at_once: int | None = None
    """Largest number of requests that a replica ran or let wait."""
    tools_at_once: int | None = None
    """Largest number of tools that ran or waited."""


def step_demand(timeline: Timeline) -> Demand:
    """Return the demand for engines and tools at once, to compare with settings that limit these numbers."""
    fitting: dict[tuple[int, str], list[float]] = defaultdict(list)
    for engine, used, running in _together(timeline, KV_CACHE, RUNNING_REQUESTS):
        if used >= FULL and running >= 1:
            fitting[engine].append(running)
    load = [
        round(running + waiting)
        for _, running, waiting in _together(timeline, RUNNING_REQUESTS, WAITING_REQUESTS)
    ]
    load += (
        running + waiting
        for engine in timeline.passes
        for running, waiting in zip(engine.noted.passes.running, engine.noted.passes.waiting, strict=True)
    )
    tools = placed(timeline, (span for span in timeline.spans if is_tool(span.role, span.stage)))
    return Demand(
        fitting_requests=min((round(statistics.median_low(runs)) for runs in fitting.values()), default=None),
        requests_at_once=max(load, default=None),
        tools_at_once=peak(tools) or None,
    )


def _together(timeline: Timeline, one: str, other: str) -> Iterator[tuple[tuple[int, str], float, float]]:
    """Yield (process and engine, value, value of the other) of two counters that were sampled at one time."""
    series: dict[str, dict[tuple[int, str], dict[int, float]]] = {one: {}, other: {}}
    for counter in timeline.counters:
        if counter.name in series:
            times = dict(zip(counter.times_ns, counter.values, strict=True))
            series[counter.name][counter.process, counter.of] = times
    for engine, values in series[one].items():
        others = series[other].get(engine, {})
        for at_ns, value in values.items():
            if at_ns in others:
                yield engine, value, others[at_ns]


Direction: TypeAlias = Literal["higher", "lower", "on"]


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of the framework at hand that advice suggests to change."""

    framework: str
    version: str | None = None
    """The framework's version, as recorded."""
    setting: str
    present: bool | int | float | str | None = None
    """The present value, or None if it is unset or differs between processes."""
    suggested: bool | int | float | str | None = None
    """The suggested value; None if no measurement gives one."""
    direction: Direction
    """The direction of the change; `on` turns a switch on."""
    predicted_saving_ns: int | None = None
    """Saving per step that what-if predicts, or None if what-if cannot make this change, refuses it, or
    predicts no saving."""
    error_ns: int | None = None
    """Half of the interval of 95 % around the prediction: the distance to its farther end."""


class Located(NamedTuple):
    """A setting, with the framework or engine that has it."""

    framework: FrameworkSettings
    setting: Setting


Settings: TypeAlias = Mapping[str, Located]
"""{knob: its setting}."""


def step_settings(manifest: Manifest | None) -> Settings:
    """Return the settings that the processes of a step recorded. For a knob that a framework and its engine
    both have, return the framework's.
    """
    parts = () if manifest is None else sorted(manifest.processes, key=lambda part: not part.owner)
    recorded = [framework for part in parts for framework in part.settings]
    located: dict[str, Located] = {}
    for framework in sorted(recorded, key=lambda framework: framework.engine):
        for setting in framework.settings:
            known = located.setdefault(setting.knob, Located(framework, setting))
            if known.framework.framework == framework.framework and known.setting != setting:
                differs = msgspec.structs.replace(setting, value=None, better=None)
                located[setting.knob] = Located(framework, differs)
    return located


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step that rules use. Shares are of the step without the capture's opening and
    closing.
    """

    breakdown: Breakdown
    critical_path: CriticalPath
    causes: Sequence[OtherCause] = ()
    """The causes within the step, the largest saving first."""
    baseline: Baseline | None
    stages: Table[Stage]
    long_tail: LongTail | None
    batches: tuple[Batches, ...] = ()
    idle: Table[Idle]
    syncing_ns: Mapping[str, int] = {}  # never written
    """Time in collectives that moved weights, by the name of the process."""
    vain_waits: Table[VainWait] = Table()
    engines: Table[Engine]
    traces: TraceTables | None
    counters: Counters | None = None
    health: Health
    profiling: Profiling = Profiling()
    cut: frozenset[str] = frozenset()
    """Names of processes whose recording ended before their work did, so that some of their calls were cut
    off."""
    over_budget: frozenset[str] = frozenset()
    """The profilers that a budget ended."""
    demand: Demand = Demand()
    settings: Settings = {}
    """Settings of the framework at hand; empty if no framework is known."""
    what_if: WhatIf = no_saving
    names: ManyNames | None = None
    """The limit on stage names that was reached; None if each stage and role has a row."""

    @property
    def counter_rows(self) -> Sequence[CounterRow]:
        return () if self.counters is None else self.counters.rows

    @property
    def memory(self) -> Sequence[MemoryRow]:
        return () if self.traces is None else self.traces.memory


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    """Name of the rule, which does not change, for scripts."""
    kind: Literal["alarm", "hint"] = "hint"
    """`alarm`: something is wrong, or the numbers mislead. `hint`: time could be saved."""
    what: str
    because: tuple[str, ...]
    """The numbers that the advice is based on."""
    do: str
    saves_ns: int | None = None
    """An upper bound of what the step would be shorter by if the cause took no time and everything else kept
    its duration and order. None if unknown."""
    settings: tuple[SettingChange, ...] = ()
    """Settings of the framework at hand to change; empty if none is known."""


def is_unedited(evidence: Evidence) -> bool:
    """Return whether the reader can change only the configuration, and no code."""
    return evidence.health.opened_by == "instrument"


def share_of_step(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {percentage_of(wall_ns, evidence.breakdown.window_ns)} of the step"


def percentage_of(part: int, whole: int) -> str:
    return f"{percent_of(part, whole)} %"
