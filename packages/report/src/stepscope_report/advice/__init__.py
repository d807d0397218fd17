"""Advice on a step, with one module for each family of rules. `sections.advice` lists the rules.

Here are the figures of a step that rules read, and the record of one piece of advice.

Figures that belong to no section of the report are computed here: the profilers that ran, the demand for
engines and tools, and the settings of the framework.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import KV_CACHE, RUNNING_REQUESTS, WAITING_REQUESTS
from stepscope.files.manifest import FrameworkSettings, Manifest, Setting
from stepscope_report.accounting import Pair, clipped, union_ns
from stepscope_report.division import beside_step
from stepscope_report.formatting import duration, percent_of
from stepscope_report.sections.baseline import Baseline
from stepscope_report.sections.batches import Batches
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.sections.cause import OtherCause
from stepscope_report.sections.counters import CounterRow, Counters
from stepscope_report.sections.critical_path import CriticalPath, VainWait
from stepscope_report.sections.engines import Engine
from stepscope_report.sections.health import Health
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.traces import MemoryRow, TraceTables
from stepscope_report.spans import ManyNames, above, is_tool, placed
from stepscope_report.table import Table, grouped
from stepscope_report.timeline import Timeline, TraceActivity
from stepscope_report.whatif import peak
from stepscope_report.whatif.prediction import WhatIf, no_saving

_HEAVY = {"with_stack": "stacks", "record_shapes": "shapes", "profile_memory": "memory"}


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a profiler recorded, or a replica that its engine's own profiler recorded."""

    name: str
    """Name of the process in the timeline, such as `actor 0` or `rollout replica 1`; or `replica 1` if the
    engine recorded the replica as a whole."""
    role: str
    has_peers: bool = False
    """True if a profiler recorded other processes of the same role too."""
    by_torch: bool = False
    """True if torch.profiler recorded the process. `torch.schedule` can shorten such recordings."""
    heavy: tuple[str, ...] = ()
    """Options that were on and make recordings large: `stacks`, `shapes`, `memory`."""
    engine: bool = False
    """True if the profiler belongs to an inference engine."""


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """The profilers that ran in one step, and the kind of devices that their traces show."""

    recorded: tuple[Profiled, ...] = ()
    """Recorded processes and replicas. Empty if no profiler ran."""
    given: bool = False
    """True if the capture was called with engines, whether or not a profiler recorded the engines."""
    gpu: bool = False
    """True if a trace shows a GPU. False if there are no traces."""
    npu: bool = False
    """True if a trace shows an Ascend NPU."""
    on_cpu: bool = False
    """True if there are traces, and neither a trace nor a process has a device."""
    prepared: bool = False
    """True if the owner called `prepare` before the capture, so that the capture did not pay the one-off cost
    of opening."""
    writers: tuple[tuple[str, int], ...] = ()
    """(replica, ns) for each replica whose own profiler started or wrote its file while the capture was
    opened or closed. `ns` is the time that this took. The slowest first."""
    met: frozenset[str] = frozenset()
    """Names of the processes that answered the owner, and are therefore among the capture's workers."""


def step_profilers(timeline: Timeline, activities: Sequence[TraceActivity]) -> Profiling:
    """Return the profilers that ran, according to the manifest and the traces."""
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
    """Yield the recorded processes that have spans."""
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
    """Yield the replicas that their engines recorded, and the recorded processes of engines without spans."""
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
    """Return the part of `pairs`, in ns, in which the capture was being opened or closed."""
    (opening_ns, closing_ns), window = beside_step(timeline), timeline.window
    opening = clipped(pairs, window.start_ns - opening_ns, window.start_ns)
    return union_ns([*opening, *clipped(pairs, window.end_ns, window.end_ns + closing_ns)])


FULL = 95
"""Use in percent from which a KV cache counts as full."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for engines and tools in one step. A number is None if nothing recorded states it."""

    fitting_requests: int | None = None
    """Number of requests that ran in a replica while its KV cache was full: the median over samples, and the
    lowest over replicas."""
    requests_at_once: int | None = None
    """Largest number of requests that one replica was running or had waiting."""
    tools_at_once: int | None = None
    """Largest number of tool calls that were running or waiting at the same time."""
    tools_ns: int | None = None
    """Sum of the durations of the tool calls that are inside no other tool call."""


def step_demand(timeline: Timeline) -> Demand:
    """Return the demand of a step, for comparison with settings that limit the demand."""
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
        tools_ns=sum(
            timeline.until_ns(span) - span.start_ns
            for span in timeline.spans
            if is_tool(span.role, span.stage)
            and not any(is_tool(outer.role, outer.stage) for outer in above(timeline, span))
        ),
    )


def _together(timeline: Timeline, one: str, other: str) -> Iterator[tuple[tuple[int, str], float, float]]:
    """Yield ((process, engine), value of counter `one`, value of counter `other`) for each time at which both
    were sampled.
    """
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
    """A change of one setting of the user's framework that advice suggests."""

    framework: str
    version: str | None = None
    """Version of the framework, or None if it was not recorded."""
    setting: str
    present: bool | int | float | str | None = None
    """Present value. None if the setting is unset or its value differs between processes."""
    suggested: bool | int | float | str | None = None
    """Suggested value. None if no measurement leads to a value."""
    direction: Direction
    """Direction of the change. `on` turns a switch on."""
    predicted_saving_ns: int | None = None
    """Time per step in ns that the change saves, as predicted by what-if. None if what-if cannot predict this
    change or predicts no saving."""
    error_ns: int | None = None
    """Uncertainty of the prediction in ns: the distance from the prediction to the farther end of its 95 %
    interval. None without a prediction."""


class Located(NamedTuple):
    """A setting, together with the framework or engine that it belongs to."""

    framework: FrameworkSettings
    setting: Setting


Settings: TypeAlias = Mapping[str, Located]
"""Settings by knob, the name that frameworks share for a setting of the same meaning."""


def step_settings(manifest: Manifest | None) -> Settings:
    """Return the settings that the processes of a step recorded, by knob. If a framework and its engine both
    have a setting for a knob, the framework's is returned.
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
    """The figures of a step that rules read. Shares are of the step's duration, without the capture's opening
    and closing.
    """

    breakdown: Breakdown
    critical_path: CriticalPath
    causes: Sequence[OtherCause] = ()
    """Causes within the step, the largest saving first."""
    beside_ns: int | None = None
    """Part in ns of the time by which the step was longer than usual, as explained by faster profiled steps.
    The profiler did not cause this part, because it slowed those steps too. None if no captured step near
    this one was faster, or if a faster one was not profiled."""
    is_explained: bool = False
    """True if all causes together explain half of the time by which the step was longer than usual. Causes
    found by comparison with other steps count too."""
    baseline: Baseline | None
    stages: Table[Stage]
    long_tail: LongTail | None
    batches: tuple[Batches, ...] = ()
    idle: Table[Idle]
    syncing_ns: Mapping[str, int] = {}  # never written
    """Time in collectives that moved weights, in ns, by name of the process."""
    vain_waits: Table[VainWait] = Table()
    engines: Table[Engine]
    traces: TraceTables | None
    counters: Counters | None = None
    health: Health
    profiling: Profiling = Profiling()
    cut: frozenset[str] = frozenset()
    """Names of processes whose recording ended before their work did, so that some of their calls have no
    end."""
    over_budget: frozenset[str] = frozenset()
    """Names of processes whose recording a budget ended."""
    demand: Demand = Demand()
    settings: Settings = {}
    """Settings of the user's framework by knob. Empty if no framework is known."""
    what_if: WhatIf = no_saving
    names: ManyNames | None = None
    """The names of stages and roles, if they are too many for rows of their own. None if each has its own
    row."""

    @property
    def counter_rows(self) -> Sequence[CounterRow]:
        return () if self.counters is None else self.counters.rows

    @property
    def memory(self) -> Sequence[MemoryRow]:
        return () if self.traces is None else self.traces.memory


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    """Name of the rule, which scripts can rely on."""
    kind: Literal["alarm", "hint"] = "hint"
    """`alarm`: something is wrong, or the report's numbers mislead. `hint`: time could be saved."""
    what: str
    because: tuple[str, ...]
    """The figures on which the advice is based, as text."""
    do: str
    saves_ns: int | None = None
    """Upper bound of the time by which the step would be shorter if the cause took no time and everything
    else kept its duration and order. None if unknown."""
    settings: tuple[SettingChange, ...] = ()
    """Changes of settings of the user's framework. Empty if no setting is known."""


def is_unedited(evidence: Evidence) -> bool:
    """Return True if the user can change only the configuration, because the program is unedited."""
    return evidence.health.opened_by == "instrument"


def share_of_step(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {percentage_of(wall_ns, evidence.breakdown.window_ns)} of the step"


def percentage_of(part: int, whole: int) -> str:
    return f"{percent_of(part, whole)} %"
