"""*Operators and kernels*, *Devices* and memory: the tables that are computed from the step's traces.

This file is longer than 500 lines because the numbers of a section, its tables and its charts are read
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from stepscope_report.accounting import rank_of
from stepscope_report.charts import pick
from stepscope_report.formatting import LISTED, count, doubt, duration, percent_of, say_doubted, size
from stepscope_report.html import EMPTY, ROWS, Html, draw, illustrated, join, section, stacked, tag
from stepscope_report.sections import DEVICES, Section
from stepscope_report.sections.profiler_steps import ProfilerStepRow, profiler_steps, step_tables
from stepscope_report.stragglers import StragglerRow, stragglers
from stepscope_report.table import Block, Listing, Table, TextTable, grouped
from stepscope_report.timeline import FileProblem, TraceActivity, Traces
from stepscope_report.timeline.activity.doubts import is_doubt

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page, Sources

TOP = 20
"""Largest number of operators, and also of marks and of kernels, that a report keeps for each role."""
OperatorKind: TypeAlias = Literal["cpu", "mark", "compute", "communication", "memory", "sync"]


class OperatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """An operator (CPU), a mark, or a kernel (device), over all processes of a role."""

    role: str
    name: str
    kind: OperatorKind
    """Kind of the row. `cpu`: an operator. `mark`: a range named by `record_function`, NVTX or a decorator;
    its own time is Python code between operators, or waiting. The other kinds are those of `Kernel.work`."""
    processes: int
    count: int
    self_ns: int
    """Time in ns without the operators called inside, over all calls and processes. For a kernel, the same as
    `total_ns`."""
    total_ns: int
    mean_ns: int
    max_ns: int


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one device by one process, over all streams. Times in which several streams ran count once."""

    process: str
    role: str
    rank: int | None
    device: str
    recorded_ns: int
    """Total time that the process' traces cover, in ns."""
    span_ns: int
    """Time from the first to the last event of the device, added up over the process' traces."""
    busy_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    """Time of communication during which the device computed nothing."""
    memory_ns: int
    """Time of copies and of filling memory."""
    doubted: bool = False
    """True if `problems` names a trace of the process, so that its times may be wrong."""


class NoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Processes whose traces show no device activity, with the probable cause."""

    processes: tuple[str, ...]
    cause: str
    fix: str | None
    """Advice that removes the cause, or None if there is nothing to fix."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory of a device that torch's allocator held in one process."""

    process: str
    device: str
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    at_ns: int | None
    """Time of the peak in ns after the capture opened. None if the trace is unaligned."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trace, and the part of its time in which operators ran."""

    file: str
    process: str
    stage: str | None
    step: int | None = None
    """Number of the step that the trace covers. None if unknown."""
    events: int
    recorded_ns: int
    operators_ns: int
    """Time in which at least one operator ran on any thread."""
    unaligned: str | None


class TraceTables(msgspec.Struct, frozen=True, kw_only=True):
    traces: Table[TraceRow]
    operators: Table[OperatorRow]
    """Operators, marks and kernels of each role, by own time, the longest first: at most `TOP` of each."""
    devices: Table[DeviceRow]
    steps: Table[ProfilerStepRow]
    stragglers: Table[StragglerRow]
    without_device: Table[NoDevice]
    memory: Table[MemoryRow]
    unread: tuple[str, ...]
    """Names of files that no installed reader supports."""
    problems: tuple[FileProblem, ...]


def trace_tables(traces: Traces, opened_ns: int) -> TraceTables:
    """Return all tables that need nothing but the traces."""
    activities, doubted = traces.activities, doubted_processes(traces.activities)
    return TraceTables(
        traces=Table(map(_trace, activities)),
        operators=operator_times(activities),
        devices=Table(
            msgspec.structs.replace(row, doubted=row.process in doubted) for row in device_usage(activities)
        ),
        steps=Table(
            msgspec.structs.replace(row, doubted=row.process in doubted) for row in profiler_steps(activities)
        ),
        stragglers=stragglers(activities),
        without_device=missing_devices(activities),
        memory=memory_peaks(activities, opened_ns),
        unread=traces.unread,
        problems=traces.problems,
    )


def doubted_processes(activities: Iterable[TraceActivity]) -> frozenset[str]:
    """Return the names of processes with a trace that lost events or has wrong times."""
    return frozenset(
        activity.name for activity in activities if any(map(is_doubt, activity.content.problems))
    )


def operator_times(activities: Iterable[TraceActivity]) -> Table[OperatorRow]:
    """Return the operators, marks and kernels of each role, by own time, the longest first."""
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
    kept: dict[tuple[str, str], int] = defaultdict(int)
    chosen = []
    for row in rows:
        place = row.role, row.kind if row.kind in ("cpu", "mark") else "device"
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
    """Return a row for each device of each process. Several traces of one process are added up."""
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
        device=name,
        recorded_ns=sum(map(_recorded_ns, activities)),
        span_ns=_ns(sum(usage.last_us - usage.first_us for usage in devices)),
        busy_ns=_ns(sum(usage.busy_us for usage in devices)),
        compute_ns=_ns(sum(usage.compute_us for usage in devices)),
        communication_ns=_ns(sum(usage.communication_us for usage in devices)),
        exposed_ns=_ns(sum(usage.exposed_us for usage in devices)),
        memory_ns=_ns(sum(usage.memory_us for usage in devices)),
    )


_NO_WORK = "the process ran no kernel while it was recorded; others in its file did"


def missing_devices(activities: Iterable[TraceActivity]) -> Table[NoDevice]:
    """Return the processes whose traces show no device activity, grouped by probable cause. A process is left
    out if its torch was built for CPUs only.
    """
    causes: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    activities = tuple(activities)
    with_device = {activity.file for activity in activities if activity.content.devices}
    for activity in activities:
        without_cuda = activity.versions.get("torch", "").endswith("+cpu")
        content = activity.content
        timed = content.first_us is not None  # files of NCCL's Inspector have no times
        if timed and not content.devices and not content.kernels and not without_cuda:
            beside = activity.file in with_device
            why = (_NO_WORK, None) if beside else _why_no_device(activity)
            causes[why].append(activity.name)
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
    if activity.content.runtime and activity.file.endswith(".sqlite"):
        return (
            "nsys recorded calls to the device and no kernel",
            "nsys profile --trace=cuda, with an nsys that supports the driver",
        )
    if activity.content.runtime:
        return (
            (
                "the process called the device, and the profiler delivered no kernel (CUPTI): another "
                "profiler holds it, the driver reserves it for the administrator, or it measured metrics "
                "instead (profiler_metrics)"
            ),
            "end Nsight or DCGM profiling on that host; NVreg_RestrictProfilingToAdminUsers=0 for the driver",
        )
    if activity.content.device_names:
        return (
            (
                "the host has a device, and no call to one was recorded: the CPU alone was recorded, or the "
                "process used none"
            ),
            "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        )
    return "no call to a device was recorded: the process used none while it was recorded", None


def memory_peaks(activities: Iterable[TraceActivity], opened_ns: int) -> Table[MemoryRow]:
    """Return the peak of each device in each process. Empty if `profile_memory` was off."""
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
        step=activity.step,
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


SHOWN = 10
"""Largest number of kernels printed for a role; also of operators, and of marks."""
NAME = 60
"""Number of characters to which a kernel's name is cut. Full names fill whole screens."""
DEVICE_NOTE = "All streams together. Exposed: communication that no computation hides. %: of recorded."


def trace_blocks(traces: TraceTables | None, report: StepReport) -> Iterator[Block]:
    if traces is None:
        return
    for role, rows in operators_by_role(traces).items():
        shown = [*on_device(rows)[:SHOWN], *on_host(rows)[:SHOWN], *marks_of(rows)[:SHOWN]]
        yield _operators(role, shown)
    if traces.devices:
        yield _devices(*least_busy_first(traces.devices, 2 * LISTED))
    yield from step_tables(traces.steps)
    if traces.stragglers:
        yield straggler_table(traces.stragglers)
    if traces.without_device:
        yield no_device_list(traces.without_device)
    if traces.memory:
        yield memory_table(traces.memory)
    yield from trouble_lists(traces)


def operators_by_role(traces: TraceTables) -> Mapping[str, Sequence[OperatorRow]]:
    """Return {role: its rows}: kernels first, then operators, then marks."""
    roles = grouped(traces.operators, lambda row: row.role)
    return {role: [*on_device(rows), *on_host(rows), *marks_of(rows)] for role, rows in roles.items()}


def on_device(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    return [row for row in rows if row.kind not in ("cpu", "mark")]


def on_host(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    return [row for row in rows if row.kind == "cpu"]


def marks_of(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    return [row for row in rows if row.kind == "mark"]


def _operators(role: str, rows: Sequence[OperatorRow]) -> TextTable:
    columns = ("name", "kind", ">count", ">own time", ">total", ">mean", ">max")
    note = "Sums over calls and processes. mark: a named range; its own time is Python, or waiting."
    cells = tuple(map(_said_operator, rows))
    return TextTable(f"Operators and kernels: {role}", columns, cells, note if marks_of(rows) else "")


def _said_operator(row: OperatorRow) -> tuple[str, ...]:
    times = (row.self_ns, row.total_ns, row.mean_ns, row.max_ns)
    return short(row.name), row.kind, f"{row.count:,}", *map(duration, times)


def _devices(rows: Sequence[DeviceRow], order: str) -> TextTable:
    columns = ("process", "device", ">recorded", ">busy", ">compute", ">exposed communication", ">copies")
    note = f"{order} {DEVICE_NOTE}{say_doubted(row.doubted for row in rows)}".lstrip()
    return TextTable("Devices", columns, tuple(map(_said_device, rows)), note, noun="device")


def device_lines(rows: Sequence[DeviceRow], most: int) -> Iterator[str]:
    """Yield a sentence for each of up to `most` devices, and one sentence for all other devices. If there are
    more than `most` devices, the least busy devices come first.
    """
    ordered, _ = least_busy_first(rows, most)
    for row in ordered[:most]:
        process, device, recorded, busy, compute, exposed, copies = _said_device(row)
        yield (
            f"{process}, {device}, {recorded} recorded: busy {busy}, compute {compute}, "
            f"exposed communication {exposed}, copies {copies}"
        )
    if len(rows) > most:
        yield f"{len(rows) - most:,} others were busier"


def least_busy_first(rows: Sequence[DeviceRow], shown: int) -> tuple[Sequence[DeviceRow], str]:
    """Return the devices, the lowest busy share of time first, and a note with percentiles of the share.

    If there are at most `shown` devices, their order is unchanged, and the note is empty.
    """
    if len(rows) <= shown:
        return rows, ""
    ordered = sorted(rows, key=lambda row: row.busy_ns / max(row.recorded_ns, 1))
    spread = _spread([f"{percent_of(row.busy_ns, row.recorded_ns)} %" for row in ordered])
    return ordered, f"Least busy first. Busy: {spread}."


def most_memory_first(rows: Sequence[MemoryRow], shown: int) -> tuple[Sequence[MemoryRow], str]:
    """Return the rows in order of allocated memory, the most first, and a note with percentiles.

    If there are at most `shown` rows, their order is unchanged, and the note is empty.
    """
    if len(rows) <= shown:
        return rows, ""
    ordered = sorted(rows, key=lambda row: -row.allocated_bytes)
    spread = _spread([size(row.allocated_bytes) for row in reversed(ordered)])
    return ordered, f"Most first. Allocated: {spread}."


def _spread(ascending: Sequence[str]) -> str:
    """Return percentiles of the ascending texts: `p10 40 %, p50 61 %, p90 64 %, most 65 %, of 1,024`."""
    points = (f"p{percent} {ascending[rank_of(percent, len(ascending))]}" for percent in (10, 50, 90))
    return f"{', '.join(points)}, most {ascending[-1]}, of {len(ascending):,}"


def _said_device(row: DeviceRow) -> tuple[str, ...]:
    parts = (
        f"{duration(ns)} {percent_of(ns, row.recorded_ns)} %"
        for ns in (row.busy_ns, row.compute_ns, row.exposed_ns, row.memory_ns)
    )
    return doubt(row.process, row.doubted), row.device, duration(row.recorded_ns), *parts


def straggler_table(rows: Sequence[StragglerRow]) -> TextTable:
    """Return the table of processes that entered collectives last. The process that made others wait longest
    comes first.
    """
    columns = ("collective", "process", ">calls", ">last", ">others waited", ">waited")
    note = "last: calls that it entered after all others. others waited: in total, for this process."
    return TextTable("Stragglers in collectives", columns, tuple(map(_straggler, rows)), note, noun="row")


def _straggler(row: StragglerRow) -> tuple[str, ...]:
    counts = f"{row.calls:,}", f"{row.last:,}"
    return (
        short(row.collective),
        row.process,
        *counts,
        duration(row.others_waited_ns),
        duration(row.waited_ns),
    )


def no_device_list(rows: Sequence[NoDevice]) -> Listing:
    """Return the list of processes whose trace shows no device activity, with the probable cause."""
    return Listing("No device activity in a trace", tuple(map(_say_no_device, rows)))


def _say_no_device(row: NoDevice) -> str:
    """Return one line of `no_device_list`: `actor 0, and 3 more: the configuration records the CPU
    alone. Fix: ...`.
    """
    first, *others = row.processes
    names = " and ".join(row.processes) if len(others) < 2 else f"{first}, and {len(others):,} more"
    return f"{names}: {row.cause}" + (f". Fix: {row.fix}" if row.fix else "")


def memory_table(rows: Sequence[MemoryRow]) -> TextTable:
    """Return the table of peaks of torch's allocators."""
    columns = ("process", "device", ">allocated", ">reserved", ">of", ">at")
    ordered, order = most_memory_first(rows, 2 * LISTED)
    note = f"{order} As torch's allocators counted. at: time of the peak.".lstrip()
    return TextTable("Most memory", columns, tuple(map(_memory, ordered)), note, noun="row")


def _memory(row: MemoryRow) -> tuple[str, ...]:
    capacity = "-" if row.capacity_bytes is None else size(row.capacity_bytes)
    held = (size(row.allocated_bytes), size(row.reserved_bytes))
    return row.process, row.device, *held, capacity, duration(row.at_ns)


def trouble_lists(traces: TraceTables) -> Iterator[Listing]:
    """Yield the list of problems in traces, and the list of files that no reader supports."""
    if traces.problems:
        lines = tuple(map(say_problem, traces.problems))
        yield Listing("Can these traces be believed?", lines, bad=True)
    if traces.unread:
        yield Listing("Not looked into", tuple(traces.unread))


def say_problem(problem: FileProblem) -> str:
    """Return a problem as text: `rank0.json: events without a time (3 events)`."""
    events = "" if problem.events is None else f" ({count(problem.events, 'event')})"
    return f"{problem.file}: {problem.what}{events}"


def short(name: str, most: int = NAME) -> str:
    """Return a kernel's name, without its middle if it is longer than `most` characters."""
    return name if len(name) <= most else f"{name[: most - 20]}...{name[-17:]}"


DEVICE_BARS = "compute, exposed communication, copies and others"
DRAWN = 128
"""Up to this number, each device has a row. Of more devices, the least busy and every k-th have one."""


def draw_traces(traces: TraceTables | None, page: Page) -> Iterator[Html]:
    """Yield operators, devices and memory for the page. Nothing if no trace was found."""
    if traces is not None and (traces.traces or traces.problems or traces.unread):
        yield section("kernels", "Operators and kernels", *_drawn_operators(traces), note=_note(traces))
        yield from _devices_and_memory(traces)


def _note(traces: TraceTables) -> str:
    events = sum(row.events for row in traces.traces)
    return f"From {count(len(traces.traces), 'trace')} with {events:,} events. own time: without calls below."


def _drawn_operators(traces: TraceTables) -> Iterator[Html]:
    for role, rows in operators_by_role(traces).items():
        block, longest_ns = _operators(role, rows), max((row.self_ns for row in rows), default=0)
        bars = [stacked([(f"w-{row.kind}", row.self_ns, row.name)], longest_ns) for row in rows]
        note = tag("p", block.note, class_="note") if block.note else EMPTY
        yield join(tag("h3", role), illustrated(block, 2, "own time", bars), note)
    yield from map(draw, trouble_lists(traces))


def _devices_and_memory(traces: TraceTables) -> Iterator[Html]:
    parts: list[Html] = []
    notes = []
    if traces.devices:
        ordered, order = least_busy_first(traces.devices, ROWS)
        shown = [ordered[at] for at in pick(len(ordered), DRAWN, range(ROWS))]
        block = _devices(shown, order)
        parts.append(illustrated(block, 2, DEVICE_BARS, list(map(_device_bar, shown)), "device-table"))
        notes = [block.note]
        if len(shown) < len(ordered):
            notes.append(f"{len(shown):,} are shown: the least busy ones, and others evenly chosen.")
    parts += map(draw, step_tables(traces.steps))
    if traces.stragglers:
        late = straggler_table(traces.stragglers[:DRAWN])
        more = f" The first {DRAWN} of {len(traces.stragglers):,} rows are shown; --json has all."
        cut = len(traces.stragglers) > DRAWN
        parts.append(draw(msgspec.structs.replace(late, note=late.note + more * cut)))
    if traces.without_device:
        parts.append(draw(no_device_list(traces.without_device)))
    if traces.memory:
        title = "Most memory, as torch's allocators counted"
        parts.append(draw(msgspec.structs.replace(memory_table(traces.memory), title=title, note="")))
    if parts:
        yield section("devices", "Devices", *parts, note=" ".join(filter(None, notes)))


def _device_bar(row: DeviceRow) -> Html:
    rest_ns = max(0, row.busy_ns - row.compute_ns - row.exposed_ns)
    parts = (("compute", row.compute_ns), ("communication", row.exposed_ns), ("memory", rest_ns))
    bars = ((f"w-{kind}", ns, f"{row.process}: {kind} {duration(ns)}") for kind, ns in parts)
    return stacked(bars, row.recorded_ns)


def _traces(sources: Sources) -> TraceTables | None:
    traces = sources.traces
    return None if traces is None else trace_tables(traces, sources.timeline.window.start_ns)


TRACES = Section(
    name="traces",
    title="Operators and kernels",
    compute=_traces,
    terminal=trace_blocks,
    html=draw_traces,
    page=DEVICES,
)
