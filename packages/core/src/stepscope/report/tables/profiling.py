"""The profilers that ran in a step: what advice about them may speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

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
        met=frozenset(process.name for process in timeline.processes if process.info.key in began),
    )
