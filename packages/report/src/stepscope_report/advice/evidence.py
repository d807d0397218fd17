"""The figures that rules of advice use, and the advice that they give.

Figures that no section of the report has are computed here: the profilers that ran, the demand for engines
and tools, and the settings of the framework at hand.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import KV_CACHE, RUNNING_REQUESTS, WAITING_REQUESTS
from stepscope.files.manifest.records import FrameworkSettings, Manifest, Setting
from stepscope_report.accounting import Pair, clipped, union_ns
from stepscope_report.division import beside_step
from stepscope_report.formatting import duration, percent_of
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
from stepscope_report.table import Table, grouped
from stepscope_report.timeline import Timeline, TraceActivity
from stepscope_report.whatif.model import peak
from stepscope_report.whatif.prediction import WhatIf, no_saving

_HEAVY = {"with_stack": "stacks", "record_shapes": "shapes", "profile_memory": "memory"}


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """One process that a profiler recorded, or one replica that its engine's own profiler recorded."""

    name: str
    """The name as in the timeline: `actor 0`, `rollout replica 1`; `replica 1` if the engine recorded it as a
    whole."""
    role: str
    has_peers: bool = False
    """True if other processes of its role were recorded too."""
    by_torch: bool = False
    """True if torch.profiler recorded it, which `torch.schedule` can shorten."""
    heavy: tuple[str, ...] = ()
    """Options that make recordings large and were on: `stacks`, `shapes`, `memory`."""
    engine: bool = False
    """True if the profiler is an engine's own."""


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """The profilers of one step, and the devices that their traces show."""

    recorded: tuple[Profiled, ...] = ()
    """Empty if no profiler ran."""
    given: bool = False
    """True if engines were given to the capture, recorded or not."""
    gpu: bool = False
    """True if a trace shows a GPU. False without traces."""
    npu: bool = False
    """True if a trace shows an Ascend NPU."""
    on_cpu: bool = False
    """True if there are traces, and neither they nor the processes have a device."""
    prepared: bool = False
    """True if the owner called `prepare` before the capture, so that its one-off cost was paid."""
    writers: tuple[tuple[str, int], ...] = ()
    """(replica, ns): the replicas whose own profilers started or wrote while the capture opened or closed,
    and for how long. The slowest first."""
    met: frozenset[str] = frozenset()
    """Names of the processes that answered the owner, and so are among its workers."""


def step_profilers(timeline: Timeline, activities: Sequence[TraceActivity]) -> Profiling:
    """Return the profilers that ran, by the manifest and by the traces."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    began = {key for part in parts for key in part.began}
    devices = {device.name for activity in activities for device in activity.content.devices}
    named = {name for activity in activities for name in activity.content.device_names}
    npu = any("npu" in name.lower() or "ascend" in name.lower() for name in devices | named)
    return Profiling(
        recorded=(*_recorded_processes(timeline, activities), *_recorded_replicas(timeline, activities)),
        given=timeline.replicas > 0,
        gpu=bool(devices or named) and not npu,
        npu=npu,
        on_cpu=bool(activities)
        and not (devices or named)
        and all(part.hardware.device is None for part in parts),
        prepared=any(part.prepared for part in parts if part.owner),
        writers=_writers(timeline),
        met=frozenset(process.name for process in timeline.processes if process.info.key in began),
    )


def _recorded_processes(timeline: Timeline, activities: Sequence[TraceActivity]) -> Iterator[Profiled]:
    """Yield the processes with spans that a profiler recorded."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    tools = {
        (part.process.key, artifact.tool)
        for part in parts
        for item in part.expected
        if item.kind == "trace"
        for artifact in item.artifacts
    }
    own = {part.process.key for part in parts if part.profiled}
    traces = grouped(activities, lambda activity: activity.process)
    recorded = {
        index: process
        for index, process in enumerate(timeline.processes)
        if process.profiled or index in traces
    }
    roles = Counter(process.info.role for process in recorded.values())
    for index, process in recorded.items():
        yield Profiled(
            name=process.name,
            role=process.info.role,
            has_peers=roles[process.info.role] > 1,
            by_torch=(process.info.key, "torch") in tools,
            heavy=_heavy(traces.get(index, ())),
            engine=process.profiled and process.info.key not in own,
        )


def _recorded_replicas(timeline: Timeline, activities: Sequence[TraceActivity]) -> Iterator[Profiled]:
    """Yield the replicas that their engines recorded, and the engines' processes that left no spans."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    names = [
        item.name for part in parts for item in part.expected if item.kind == "engine" and item.artifacts
    ]
    heavy = _heavy([activity for activity in activities if activity.replica is not None])
    for name in dict.fromkeys(names):
        yield Profiled(name=name, role="rollout", heavy=heavy, engine=True)
    for activity in activities:
        if activity.process is None:
            role = activity.info.role
            yield Profiled(name=activity.name, role=role, heavy=_heavy([activity]), engine=True)


def _heavy(activities: Sequence[TraceActivity]) -> tuple[str, ...]:
    return tuple(
        word
        for option, word in _HEAVY.items()
        if any(activity.options.get(option) is True for activity in activities)
    )


def _writers(timeline: Timeline) -> tuple[tuple[str, int], ...]:
    stalls: dict[int, list[Pair]] = {}
    for stall in timeline.stalls:
        stalls.setdefault(stall.replica, []).append((stall.start_ns, stall.end_ns))
    wrote = ((f"replica {number}", _beside_ns(timeline, own)) for number, own in stalls.items())
    return tuple(sorted((pair for pair in wrote if pair[1]), key=lambda pair: (-pair[1], pair[0])))


def _beside_ns(timeline: Timeline, pairs: Sequence[Pair]) -> int:
    """Return the length of the parts of `pairs` in which the capture was being opened or closed."""
    (opening_ns, closing_ns), window = beside_step(timeline), timeline.window
    opening = clipped(pairs, window.start_ns - opening_ns, window.start_ns)
    return union_ns([*opening, *clipped(pairs, window.end_ns, window.end_ns + closing_ns)])


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
