"""Tables of the step's torch traces: operators, devices, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from stepscope_report.table import Table, grouped
from stepscope_report.tables.stragglers import StragglerRow, stragglers
from stepscope_report.timeline import FileProblem, TraceActivity, Traces

TOP = 20
"""Operators, and kernels, of each role that a report keeps."""
OperatorKind: TypeAlias = Literal["cpu", "mark", "compute", "communication", "memory"]


class OperatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operator (on the CPU) or kernel (on devices) over all processes of a role."""

    role: str
    name: str
    kind: OperatorKind
    """`cpu`: an operator. `mark`: what a decorator or `record_function` named; its own time is between
    operators, in Python. The others are of devices."""
    processes: int
    count: int
    self_ns: int
    """A sum over calls and processes, without the operators below it. Of a kernel it is `total_ns`."""
    total_ns: int
    mean_ns: int
    max_ns: int


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device as one process used it. All streams together: no instant counts twice."""

    process: str
    role: str
    rank: int | None
    device: str
    recorded_ns: int
    """Time for which the process' traces were open."""
    span_ns: int
    """From the first to the last event of the device, summed over traces."""
    busy_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    """Communication that no computation hides."""
    memory_ns: int
    """Copies and fills."""


class NoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Processes in whose traces no device did anything, and why that probably is."""

    processes: tuple[str, ...]
    cause: str
    fix: str | None
    """None: there is nothing to be fixed."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory that torch's allocator held of a device."""

    process: str
    device: str
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    at_ns: int | None
    """Time of the peak, after the capture opened. None: the trace is unaligned."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trace, and how much of its time operators ran."""

    file: str
    process: str
    stage: str | None
    events: int
    recorded_ns: int
    operators_ns: int
    """Time in which an operator ran on any thread."""
    unaligned: str | None


class TraceTables(msgspec.Struct, frozen=True, kw_only=True):
    traces: Table[TraceRow]
    operators: Table[OperatorRow]
    """By role; in a role the longest own time first, at most `TOP` of the CPU and `TOP` of devices."""
    devices: Table[DeviceRow]
    stragglers: Table[StragglerRow]
    without_device: Table[NoDevice]
    memory: Table[MemoryRow]
    unread: tuple[str, ...]
    """Files that no reader reads."""
    problems: tuple[FileProblem, ...]


def trace_tables(traces: Traces, opened_ns: int) -> TraceTables:
    """Return all tables that need nothing but the traces."""
    activities = traces.activities
    return TraceTables(
        traces=Table(map(_trace, activities)),
        operators=operator_times(activities),
        devices=device_usage(activities),
        stragglers=stragglers(activities),
        without_device=missing_devices(activities),
        memory=memory_peaks(activities, opened_ns),
        unread=traces.unread,
        problems=traces.problems,
    )


def operator_times(activities: Iterable[TraceActivity]) -> Table[OperatorRow]:
    """Return the operators and kernels of each role, the longest own time first."""
    times: dict[tuple[str, OperatorKind, str], list[tuple[str, int, float, float, float]]]
    times = defaultdict(list)
    for activity in activities:
        role = activity.info.role
        for operator in activity.content.operators:
            kind: OperatorKind = "mark" if operator.outer else "cpu"
            took = (activity.name, operator.count, operator.self_us, operator.total_us, operator.max_us)
            times[role, kind, operator.name].append(took)
        for kernel in activity.content.kernels:
            took = (activity.name, kernel.count, kernel.total_us, kernel.total_us, kernel.max_us)
            times[role, kernel.work, kernel.name].append(took)
    rows = [_operator(key, parts) for key, parts in times.items()]
    rows.sort(key=lambda row: (row.role, -row.self_ns, row.name))
    kept: dict[tuple[str, bool], int] = defaultdict(int)
    chosen = []
    for row in rows:
        place = row.role, row.kind in ("cpu", "mark")
        kept[place] += 1
        if kept[place] <= TOP:
            chosen.append(row)
    return Table(chosen)


def _operator(
    key: tuple[str, OperatorKind, str], parts: Sequence[tuple[str, int, float, float, float]]
) -> OperatorRow:
    role, kind, name = key
    count = sum(part[1] for part in parts)
    total_ns = _ns(sum(part[3] for part in parts))
    return OperatorRow(
        role=role,
        name=name,
        kind=kind,
        processes=len({part[0] for part in parts}),
        count=count,
        self_ns=_ns(sum(part[2] for part in parts)),
        total_ns=total_ns,
        mean_ns=total_ns // max(count, 1),
        max_ns=_ns(max(part[4] for part in parts)),
    )


def device_usage(activities: Iterable[TraceActivity]) -> Table[DeviceRow]:
    """Return a row for each device of each process. Traces of several stages are added up."""
    by_device: dict[tuple[str, str], list[TraceActivity]] = defaultdict(list)
    for activity in activities:
        for device in activity.content.devices:
            by_device[activity.name, device.name].append(activity)
    return Table(_device(name, device, group) for (name, device), group in by_device.items())


def _device(process: str, name: str, activities: Sequence[TraceActivity]) -> DeviceRow:
    devices = [usage for activity in activities for usage in activity.content.devices if usage.name == name]
    return DeviceRow(
        process=process,
        role=activities[0].info.role,
        rank=activities[0].info.rank,
        device=f"GPU {name}" if name.isdigit() else name,
        recorded_ns=sum(map(_recorded_ns, activities)),
        span_ns=_ns(sum(usage.last_us - usage.first_us for usage in devices)),
        busy_ns=_ns(sum(usage.busy_us for usage in devices)),
        compute_ns=_ns(sum(usage.compute_us for usage in devices)),
        communication_ns=_ns(sum(usage.communication_us for usage in devices)),
        exposed_ns=_ns(sum(usage.exposed_us for usage in devices)),
        memory_ns=_ns(sum(usage.memory_us for usage in devices)),
    )


def missing_devices(activities: Iterable[TraceActivity]) -> Table[NoDevice]:
    """Return the traces in which no device did anything, by likely cause. None of a torch for CPUs alone."""
    causes: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for activity in activities:
        without_cuda = activity.versions.get("torch", "").endswith("+cpu")
        if activity.content.events and not activity.content.devices and not without_cuda:
            causes[_why_no_device(activity)].append(activity.name)
    return Table(
        NoDevice(processes=tuple(dict.fromkeys(names)), cause=cause, fix=fix)
        for (cause, fix), names in causes.items()
    )


def _why_no_device(activity: TraceActivity) -> tuple[str, str | None]:
    refused = next((why for name, why in activity.ignored.items() if name.endswith("activities.cuda")), None)
    if refused is not None:
        return (
            refused,
            "run `python -c 'import torch; print(torch.cuda.is_available())'` in that process' place",
        )
    recorded = activity.options.get("activities")
    if isinstance(recorded, str) and recorded == "cpu":
        return "the configuration records the CPU alone", "torch: {activities: [cpu, cuda]}"
    if activity.content.runtime or activity.content.device_names:
        return (
            (
                "the process called the device, and the profiler delivered no kernel (CUPTI): another "
                "profiler holds it, or the driver reserves it for the administrator"
            ),
            "end Nsight or DCGM profiling on that host; NVreg_RestrictProfilingToAdminUsers=0 for the driver",
        )
    return "no call to a device was recorded: the process used none while it was recorded", None


def memory_peaks(activities: Iterable[TraceActivity], opened_ns: int) -> Table[MemoryRow]:
    """Return the peak of each device in each process, if `profile_memory` was on."""
    rows = (
        MemoryRow(
            process=activity.name,
            device=peak.device,
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            capacity_bytes=peak.capacity_bytes,
            at_ns=None if activity.unaligned else activity.unix_ns(peak.allocated_at_us) - opened_ns,
        )
        for activity in activities
        for peak in activity.content.memory
    )
    peaks = grouped(rows, lambda row: (row.process, row.device)).values()
    return Table(max(own, key=lambda row: row.allocated_bytes) for own in peaks)


def _trace(activity: TraceActivity) -> TraceRow:
    return TraceRow(
        file=activity.file,
        process=activity.name,
        stage=activity.stage,
        events=activity.content.events,
        recorded_ns=_recorded_ns(activity),
        operators_ns=_ns(activity.content.operators_us),
        unaligned=activity.unaligned,
    )


def _recorded_ns(activity: TraceActivity) -> int:
    content = activity.content
    return (
        0 if content.first_us is None or content.last_us is None else _ns(content.last_us - content.first_us)
    )


def _ns(us: float) -> int:
    return round(us * 1000)
