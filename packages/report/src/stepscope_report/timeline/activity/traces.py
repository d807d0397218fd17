"""Contents of a step's traces and recordings, placed on the clock of the capture's owner."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.files.cuda_memory import OOM_SUMMARY, MemorySummary
from stepscope.files.layout import StepLayout
from stepscope.files.sidecar import ProcessInfo, Sidecar
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import (
    DEVICE,
    Reading,
    is_short,
    nothing_read,
    read_trace,
    starts,
)
from stepscope_report.timeline.activity.intervals import Pair
from stepscope_report.timeline.activity.trace_events import Complete, Linked
from stepscope_report.timeline.clocks import NOT_NEAR, Hours, is_near, middle, wall_base
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.model import FileProblem, Timeline
from stepscope_report.timeline.processes import Lost, files_elsewhere, results, size_of
from stepscope_report.timeline.readers.chrome import Distributed, TraceFields
from stepscope_report.timeline.readers.contract import (
    FoundFile,
    Notes,
    Origin,
    Reader,
    Readers,
    Slice,
    Track,
    failure_noted,
    undeclared,
)
from stepscope_report.timeline.readers.nccl_inspector import InspectorReader, read_inspected
from stepscope_report.timeline.rows import Recorded, Row, Rows, axis_of, offset_at
from stepscope_report.timeline.trace_files import StepFiles, TraceFile, find_traces

_BATCH = 2000
"""Number of a recording's events that are given to a `Reading` at once."""
_LARGEST_SUMMARY = 64 << 20
"""Largest size in bytes of a summary of CUDA's memory that is read. Summaries usually have some 100 kB."""


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the step, with everything that another process needs to read the file."""

    path: Path
    name: str
    sidecar: Sidecar | None
    torch: bool
    """True for a torch trace; False if an installed reader reads the file."""
    step_mark: str | None = None
    within: Pair | None = None


def read_part(part: TracePart) -> list[ProcessContent]:
    trace = TraceFile(part.path, part.name, part.sidecar)
    reader = None if part.torch else Readers().claim(trace.found_file)[0]
    return _read_here(trace._replace(reader=reader), None, part.step_mark, part.within)


def read_all(
    traces: Sequence[TraceFile],
    on_read: Callable[[int], None] | None = None,
    executor: Executor | None = None,
    digests: Digests | None = None,
    step_mark: str | None = None,
    within: Mapping[Path, Pair] = {},
) -> list[list[ProcessContent]]:
    """Return the content of each file, by process, in the order of `traces`.

    Args:
        digests: Cache of the content of traces that were read before. Content of other traces is added to it.
        step_mark: The same as in `read_trace`.
        within: {file: `within` of `read_trace` for the file}.
    """
    contents = {} if digests is None else _kept(traces, digests, on_read)
    missing = [trace for trace in traces if trace.path not in contents]
    stamps = {} if digests is None else {trace.path: digests.stamps([trace.path]) for trace in missing}
    with closing(_read(missing, on_read, executor, step_mark, within)) as parts:
        for trace, content in zip(missing, parts, strict=True):
            if isinstance(content, Lost):
                contents[trace.path] = _alone(nothing_read(f"not read: {content.why}"))
                continue
            contents[trace.path] = content
            if digests is not None:
                digests.keep([trace.path], content, stamps[trace.path])
    return [contents[trace.path] for trace in traces]


def _kept(
    traces: Sequence[TraceFile], digests: Digests, on_read: Callable[[int], None] | None
) -> dict[Path, list[ProcessContent]]:
    contents = {}
    for trace in traces:
        content = digests.kept([trace.path], list[ProcessContent])
        if content is not None:
            contents[trace.path] = content
            if on_read is not None:
                on_read(size_of(trace.path))
    return contents


def _read(
    traces: Sequence[TraceFile],
    on_read: Callable[[int], None] | None,
    executor: Executor | None,
    step_mark: str | None,
    within: Mapping[Path, Pair],
) -> Generator[list[ProcessContent] | Lost, None, None]:
    if executor is None:
        for trace in traces:
            yield _read_here(trace, on_read, step_mark, within.get(trace.path))
        return
    parts = [
        TracePart(
            path=path,
            name=name,
            sidecar=sidecar,
            torch=reader is None,
            step_mark=step_mark,
            within=within.get(path),
        )
        for path, name, sidecar, reader in traces
    ]
    with closing(results(executor, read_part, parts, [[trace.path] for trace in traces])) as contents:
        for content, trace in zip(contents, traces, strict=True):
            yield content
            if on_read is not None:
                on_read(size_of(trace.path, executor))


def _read_here(
    trace: TraceFile, on_read: Callable[[int], None] | None, step_mark: str | None, within: Pair | None
) -> list[ProcessContent]:
    if trace.reader is None:
        return _alone(read_trace(trace.path, on_read, step_mark, within))
    if isinstance(trace.reader, InspectorReader):
        return _alone(read_inspected(trace.path, on_read))
    contents = _read_recording(trace.reader, trace.found_file, step_mark, within)
    if on_read is not None:
        on_read(size_of(trace.path))
    return contents


def _alone(content: TraceContent) -> list[ProcessContent]:
    return [ProcessContent(pid=None, content=content)]


class ProcessContent(msgspec.Struct, kw_only=True):
    """Activity of one process in a recording."""

    pid: int | None
    """Pid of the process, one of `Origin.processes`, or None for the recorded process."""
    content: TraceContent
    """The activity. `base_ns` is the zero of the activity's times, on the file's clock, or None if that clock
    is unknown."""


def _read_recording(
    reader: Reader, file: FoundFile, step_mark: str | None = None, within: Pair | None = None
) -> list[ProcessContent]:
    """Read a recording. A recording that cannot be read raises no exception; see `TraceContent.problems`."""
    contents = _Contents(reader, file, None, step_mark, within)
    if not contents.is_short():
        contents = _Contents(reader, file, contents.hours.near(), step_mark, within)
    return contents.finish()


class _Contents:
    """Reads a recording once, and collects the activity of each process."""

    def __init__(
        self,
        reader: Reader,
        file: FoundFile,
        near: tuple[float, float] | None,
        step_mark: str | None,
        within: Pair | None,
    ) -> None:
        self._step_mark = step_mark
        self._within = within
        self._notes = Notes()
        self._near = near
        self.hours = Hours()
        self._origin = Origin(clock="unknown")
        self._base_ns: int | None = None
        self._tracks: dict[int, Track] = {}
        self._pending: dict[int | None, list[Complete]] = defaultdict(list)
        self.readings: dict[int | None, Reading] = {}
        with failure_noted(reader, self._notes), closing(reader.open(file, self._notes)) as recording:
            self._origin = recording.origin
            for event in recording.events():
                if isinstance(event, Track):
                    if event.pid not in (None, *self._origin.processes):
                        raise undeclared(event)
                    self._tracks[event.track] = event
                elif isinstance(event, Slice):
                    self._take(event, self._tracks[event.track])

    def _take(self, event: Slice, track: Track) -> None:
        category = event.category or ""
        if category in DEVICE and track.device is None:
            return  # the host's record of work that is also on a device's own track
        if self._base_ns is None:
            self._base_ns = event.start_ns  # us since 1970 in a float would not be exact to the ns
        args = event.args or {}
        correlation = args.get("correlation", args.get("connection_id"))
        pending = self._pending[track.pid]
        pending.append(
            Linked(
                name=event.name,
                cat=category,
                pid=track.device if category in DEVICE and track.device is not None else 0,
                tid=track.track if track.thread is None else f"thread {track.thread}",
                correlation=correlation if isinstance(correlation, int) else -1,
                ts=(event.start_ns - self._base_ns) / 1000,
                dur=event.dur_ns / 1000,
            )
        )
        if len(pending) >= _BATCH:
            self._pass_on(track.pid)

    def _pass_on(self, pid: int | None) -> None:
        events = self._pending.pop(pid)
        reading = self.readings.get(pid)
        if reading is None:
            reading = self.readings[pid] = Reading(Notes(), self._near, self._step_mark, self._within)
        self.hours.add(starts(events))
        reading.take(events)
        if self._near is not None:
            events = [event for event in events if reading.is_near(event.ts, event.dur)]
        if events:
            reading.seen(min(event.ts for event in events), max(event.ts + event.dur for event in events))

    def is_short(self) -> bool:
        for pid in list(self._pending):
            self._pass_on(pid)
        times = [(reading.first, reading.last) for reading in self.readings.values()]
        return not times or is_short(min(first for first, _ in times), max(last for _, last in times))

    def finish(self) -> list[ProcessContent]:
        for pid in list(self._pending):
            self._pass_on(pid)
        origin = self._origin
        base_ns = None if origin.clock == "unknown" else self._base_ns
        if origin.clock == "realtime" and self.readings:
            base_ns = wall_base(base_ns, middle(next(iter(self.readings.values())).times))
        fields = TraceFields(
            base_ns=base_ns,
            distributed=None
            if origin.rank is None
            else Distributed(rank=origin.rank, world_size=origin.world_size),
            host=origin.host,
        )
        readings = self.readings or {None: Reading(Notes())}
        contents = [
            ProcessContent(pid=pid, content=reading.finish(fields)) for pid, reading in readings.items()
        ]
        contents[0].content.problems.update(self._notes.counts)
        return contents


class TraceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One trace: its process, its content and its place in the step."""

    file: str
    """Path of the file, relative to the step's folder."""
    name: str
    """Name of the process, such as `actor 0`; the same as in the timeline if the process recorded spans."""
    info: ProcessInfo
    process: int | None
    """Index in `Timeline.processes`, or None for a process without spans, such as an engine's worker."""
    stage: str | None
    """The stage that the trace covers; None if it covers the whole capture."""
    step: int | None = None
    """The step that the trace covers, or None if unknown."""
    replica: int | None = None
    """Number of the inference replica, from the sidecar if there is one. None if not stated. `info.replica`
    may lack a number that is known here."""
    topology: Mapping[str, int] | None = None
    """Position of the process in the parallel layout of the replica: `{"tp": 1, "dp": 0}`, or None if
    unknown."""
    unaligned: str | None
    """Reason why the trace's times cannot be placed in the step, or None if they can."""
    shift_ns: int
    """Unix ns on the owner's clock = us of the trace * 1000 + `shift_ns`."""
    content: TraceContent
    options: Mapping[str, str | int | float | bool | None]
    """Options of the recording, from the sidecar."""
    ignored: Mapping[str, str]
    """{option: reason} for options that had no effect."""
    versions: Mapping[str, str]

    def unix_ns(self, us: float) -> int:
        """Return a time of the trace in unix ns on the owner's clock. The result has no meaning if
        `unaligned` is set.
        """
        return round(us * 1000) + self.shift_ns


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one snapshot of CUDA's memory, with the process that took it."""

    file: str
    """Path of the file, relative to the step's folder."""
    process: int
    """Index in `Timeline.processes`."""
    stage: str | None
    """The stage that the snapshot covers; None if it covers the whole capture."""
    oom: bool
    """True if the snapshot was taken because CUDA was out of memory."""
    summary: MemorySummary
    ahead_ns: int
    """Time by which the process' wall clock is ahead of the owner's. The summary uses the process' clock."""


class Traces(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of all traces of a step."""

    activities: tuple[TraceActivity, ...]
    """The traces by process, in the order of the timeline's rows."""
    unread: tuple[str, ...]
    """Files that no reader can read, each with the reason."""
    problems: tuple[FileProblem, ...]
    """Problems inside the files. Missing files are in `Timeline.problems`."""
    memory: tuple[MemoryRecord, ...] = ()
    """Summaries of snapshots of CUDA's allocator."""


def load_traces(
    path: str | os.PathLike[str],
    timeline: Timeline,
    *,
    on_read: Callable[[int], None] | None = None,
    executor: Executor | None = None,
    digests: bool = True,
) -> Traces:
    """Read the traces of a step. The memory used does not grow with the size of the files.

    Args:
        path: The step's folder.
        timeline: Timeline of the same folder, with its processes and their clocks.
        on_read: Called with the number of bytes of each read of the files.
        executor: Processes that read the files, or None to read them in this process.
        digests: True to use and keep digests, so that traces are not read again. The result is the same.
    """
    layout = StepLayout(path)
    without, elsewhere = timeline.earlier_files, files_elsewhere(executor)
    files = find_traces(layout, timeline.run_id, without, elsewhere)
    contents = read_all(files.traces, on_read, executor, Digests(layout) if digests else None)
    return place_traces(files._replace(problems=[]), contents, timeline)  # the timeline lists these problems


class _Placed(NamedTuple):
    """Activity of one process in a trace, with the process' row."""

    trace: TraceFile
    content: TraceContent
    row: Row
    base_ns: int
    """Zero of the content's times, in unix ns on the process' host."""


def place_traces(
    files: StepFiles, contents: Sequence[Sequence[ProcessContent]], timeline: Timeline
) -> Traces:
    """Place the contents of `files.traces` on the timeline's clock, and return them."""
    rows, problems = Rows(timeline, axis_of(timeline)), [*files.problems, *_problems(files.traces, contents)]
    placed = list[_Placed]()
    for trace, held in zip(files.traces, contents, strict=True):
        placed += _placed(rows, trace, held, problems)
    rows.number()
    activities = []
    for one in placed:
        activity = _activity(timeline, one)
        if _is_far(activity, timeline):
            activity = msgspec.structs.replace(activity, unaligned="its times are far from the step")
            problems.append(FileProblem(file=activity.file, what=NOT_NEAR, events=activity.content.events))
        activities.append((one.row.pid, activity))
    memory = []
    for file in files.summaries:
        record = _read_memory(file, timeline)
        if isinstance(record, FileProblem):
            problems.append(record)
        else:
            memory.append(record)
    return Traces(
        activities=tuple(one for _, one in sorted(activities, key=lambda item: (item[0], item[1].file))),
        unread=tuple(files.unread),
        problems=tuple(problems),
        memory=tuple(memory),
    )


def _placed(
    rows: Rows, trace: TraceFile, held: Sequence[ProcessContent], problems: list[FileProblem]
) -> Iterator[_Placed]:
    if trace.reader is None:
        for one in held:
            base_ns, distributed, host = one.content.base_ns, one.content.distributed, one.content.host
            row = rows.of_chrome(trace, TraceFields(base_ns=base_ns, distributed=distributed, host=host))
            yield _Placed(trace, one.content, row, base_ns or 0)
        return
    recorded = Recorded(trace.reader, trace.found_file, trace.role)
    events = any(one.content.events for one in held)
    recorded.place(rows, own_clock=events and all(one.content.base_ns is None for one in held))
    if events and not recorded.rows:  # the content was read before, but the file cannot be opened now
        problems += [FileProblem(file=trace.name, what=what) for what in recorded.notes.counts]
    for one in held:
        known, base_ns = recorded.rows.get(one.pid), one.content.base_ns or 0
        if known is not None and one.content.events:
            wall_ns = base_ns if recorded.wall is None else recorded.wall(base_ns)
            yield _Placed(trace, one.content, known, wall_ns)


def _activity(timeline: Timeline, placed: _Placed) -> TraceActivity:
    trace, content, row, base_ns = placed
    sidecar = trace.sidecar
    offset_ns = 0
    if row.clock is not None:
        middle_us = ((content.first_us or 0.0) + (content.last_us or 0.0)) / 2
        offset_ns = offset_at(row.clock, base_ns + round(middle_us * 1000))
    own = None if row.process is None else timeline.processes[row.process]
    return TraceActivity(
        file=trace.name,
        name=row.name if own is None or row.unaligned is not None else own.name,
        info=row.info,
        process=row.process,
        stage=None if sidecar is None else sidecar.artifact.stage,
        step=None if sidecar is None or sidecar.step < 0 else sidecar.step,
        replica=row.info.replica if sidecar is None else sidecar.artifact.replica,
        topology=None if sidecar is None else sidecar.artifact.topology,
        unaligned=row.unaligned,
        shift_ns=base_ns - offset_ns,
        content=content,
        options={} if sidecar is None else sidecar.options,
        ignored={} if sidecar is None else sidecar.artifact.ignored,
        versions={} if sidecar is None else sidecar.versions,
    )


def _is_far(activity: TraceActivity, timeline: Timeline) -> bool:
    """Return whether a trace lies more than an hour from the step on its own clock."""
    first_us, last_us = activity.content.first_us, activity.content.last_us
    if activity.unaligned is not None or first_us is None or last_us is None:
        return False
    window = timeline.window
    extent = activity.unix_ns(first_us), activity.unix_ns(last_us)
    return not is_near(*extent, (window.start_ns, window.end_ns))


def _problems(traces: Sequence[TraceFile], contents: Sequence[Sequence[ProcessContent]]) -> list[FileProblem]:
    return [
        FileProblem(file=trace.name, what=what, events=events)
        for trace, held in zip(traces, contents, strict=True)
        for one in held
        for what, events in one.content.problems.items()
    ]


def _read_memory(file: TraceFile, timeline: Timeline) -> MemoryRecord | FileProblem:
    sidecar = file.sidecar
    keys = [process.info.key for process in timeline.processes]
    if sidecar is None or sidecar.process not in keys:
        return FileProblem(file=file.name, what="it is of no process of this step")
    try:
        with gzip.open(file.path) as packed:
            summary = msgspec.json.decode(packed.read(_LARGEST_SUMMARY), type=MemorySummary)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, msgspec.DecodeError) as error:
        return FileProblem(file=file.name, what=f"no summary of CUDA memory: {type(error).__name__}: {error}")
    index = keys.index(sidecar.process)
    process = timeline.processes[index]
    return MemoryRecord(
        file=file.name,
        process=index,
        stage=sidecar.artifact.stage,
        oom=sidecar.artifact.kind == OOM_SUMMARY,
        summary=summary,
        ahead_ns=offset_at(process, process.opened_ns) if process.aligned else 0,
    )
