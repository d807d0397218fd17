"""The profilers that ran in a step: what advice about them may speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from stepscope.report.accounting import Pair, clipped, union_ns
from stepscope.report.tables.breakdown import beside_step
from stepscope.timeline import Timeline, TraceActivity

_HEAVY = {"with_stack": "stacks", "record_shapes": "shapes", "profile_memory": "memory"}


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """The profilers of one step, and the devices that their traces show."""

    ran: bool = False
    """True if any did, an engine's own included."""
    several: tuple[str, ...] = ()
    """Roles of which two or more processes were recorded."""
    by_torch: bool = False
    """True if torch.profiler recorded a process, which `torch.schedule` can shorten."""
    heavy: tuple[str, ...] = ()
    """Options that make recordings large and were on: `stacks`, `shapes`, `memory`."""
    engines: bool = False
    """True if engines were recorded by their own profilers."""
    given: bool = False
    """True if engines were given to the capture, recorded or not."""
    gpu: bool = False
    """True if a trace shows a GPU. False without traces."""
    npu: bool = False
    """True if a trace shows an Ascend NPU."""
    prepared: bool = False
    """True if the owner called `prepare` before the capture, so that its one-off cost was paid."""
    writers: tuple[tuple[str, int], ...] = ()
    """(replica, ns): the replicas whose own profilers started or wrote while the capture opened or closed,
    and for how long. The slowest first."""
    met: frozenset[str] = frozenset()
    """Names of the processes that the owner had an answer from: they are among its workers."""


def step_profilers(timeline: Timeline, activities: Sequence[TraceActivity]) -> Profiling:
    """Return the profilers that ran, by the manifest and by the traces."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    recorded = {index for index, process in enumerate(timeline.processes) if process.profiled}
    recorded |= {activity.process for activity in activities if activity.process is not None}
    roles = Counter(timeline.processes[index].info.role for index in recorded)
    made = [item for part in parts for item in part.expected if item.artifacts]
    tools = {artifact.tool for item in made if item.kind == "trace" for artifact in item.artifacts}
    began = {key for part in parts for key in part.began}
    engines = any(item.kind == "engine" for item in made)
    devices = {device.name for activity in activities for device in activity.content.devices}
    named = {name for activity in activities for name in activity.content.device_names}
    npu = any("npu" in name.lower() or "ascend" in name.lower() for name in devices | named)
    return Profiling(
        ran=bool(recorded or engines),
        several=tuple(sorted(role for role, number in roles.items() if number > 1)),
        by_torch="torch" in tools,
        heavy=tuple(
            word
            for option, word in _HEAVY.items()
            if any(recorded_activity.options.get(option) is True for recorded_activity in activities)
        ),
        engines=engines,
        given=timeline.replicas > 0,
        gpu=bool(devices or named) and not npu,
        npu=npu,
        prepared=any(part.prepared for part in parts if part.owner),
        writers=_writers(timeline),
        met=frozenset(process.name for process in timeline.processes if process.info.key in began),
    )


def _writers(timeline: Timeline) -> tuple[tuple[str, int], ...]:
    stalls: dict[int, list[Pair]] = {}
    for stall in timeline.stalls:
        stalls.setdefault(stall.replica, []).append((stall.start_ns, stall.end_ns))
    wrote = ((f"replica {number}", _beside_ns(timeline, own)) for number, own in stalls.items())
    return tuple(sorted((pair for pair in wrote if pair[1]), key=lambda pair: (-pair[1], pair[0])))


def _beside_ns(timeline: Timeline, pairs: Sequence[Pair]) -> int:
    """Return the part of the pairs in which the capture opened or closed."""
    (opening_ns, closing_ns), window = beside_step(timeline), timeline.window
    opening = clipped(pairs, window.start_ns - opening_ns, window.start_ns)
    return union_ns([*opening, *clipped(pairs, window.end_ns, window.end_ns + closing_ns)])
