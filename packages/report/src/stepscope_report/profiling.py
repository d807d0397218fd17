"""The profilers that ran in a step: what advice about them may speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from stepscope_report.accounting import Pair, clipped, union_ns
from stepscope_report.division import beside_step
from stepscope_report.table import grouped
from stepscope_report.timeline import Timeline, TraceActivity

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
