"""Contents of a step's traces, each placed on the clock of the capture's owner."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec

from stepscope.files.cuda_memory import OOM_SUMMARY, MemorySummary
from stepscope.files.layout import StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.reading import read_all
from stepscope_report.timeline.activity.recordings import ProcessContent
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.model import FileProblem, Timeline
from stepscope_report.timeline.processes import files_elsewhere
from stepscope_report.timeline.readers.chrome import TraceFields
from stepscope_report.timeline.step.recorded import Recorded
from stepscope_report.timeline.step.rows import Row, Rows, axis_of, offset_at
from stepscope_report.timeline.step.traces import StepFiles, TraceFile, find_traces

_LARGEST = 64 << 20
"""Largest number of bytes that are read of a summary. A few hundred kB are usual."""


class TraceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One trace: its process, its content and its place in the step."""

    file: str
    """Relative to the step's folder."""
    name: str
    """Name of the process, the same as in the timeline if it left spans: `actor 0`, `rollout replica 1`."""
    info: ProcessInfo
    process: int | None
    """Index in `Timeline.processes`, or None if it left no spans (an engine's worker)."""
    stage: str | None
    """The stage that the trace covers; None if it covers the whole capture."""
    replica: int | None = None
    """Number of the recorded inference replica. `info` may have none."""
    topology: Mapping[str, int] | None = None
    """Place in the parallel layout of the replica: `{"tp": 1, "dp": 0}`, or None if the sidecar does not
    say."""
    unaligned: str | None
    """Reason why its times cannot be placed in the step, or None if they can."""
    shift_ns: int
    """Unix ns on the owner's clock = us of the trace * 1000 + `shift_ns`."""
    content: TraceContent
    options: Mapping[str, str | int | float | bool | None]
    """Options of the recording, from the sidecar."""
    ignored: Mapping[str, str]
    """Options that were not honoured: {option: reason}."""
    versions: Mapping[str, str]

    def unix_ns(self, us: float) -> int:
        """Return a time of the trace on the owner's clock. It is meaningless if `unaligned` is set."""
        return round(us * 1000) + self.shift_ns


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one snapshot, with its process."""

    file: str
    """Relative to the step's folder."""
    process: int
    """Index in `Timeline.processes`."""
    stage: str | None
    """The stage that the snapshot covers; None if it covers the whole capture."""
    oom: bool
    """True if it was taken because CUDA was out of memory."""
    summary: MemorySummary
    ahead_ns: int
    """Lead of the process' wall clock, which the summary uses, over the owner's."""


class Traces(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of all traces of a step."""

    activities: tuple[TraceActivity, ...]
    """The traces by process, in the order of the timeline's rows."""
    unread: tuple[str, ...]
    """Files that no reader reads, each with the reason."""
    problems: tuple[FileProblem, ...]
    """Problems of what is in the files. `Timeline.problems` has those of missing files."""
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
    """Read the traces of a step. Memory does not grow with their size.

    Args:
        path: The step's folder.
        timeline: Timeline of the same folder, with its processes and their clocks.
        on_read: Called with the number of bytes of each read of the files.
        executor: Processes that read them, or None to read them in this process.
        digests: Whether traces that were read before need not be read again. The result is the same.
    """
    layout = StepLayout(path)
    without, elsewhere = timeline.earlier_files, files_elsewhere(executor)
    files = find_traces(layout, timeline.run_id, without, elsewhere)
    contents = read_all(files.traces, on_read, executor, Digests(layout) if digests else None)
    return place_traces(files._replace(problems=[]), contents, timeline)  # the timeline has those


class _Placed(NamedTuple):
    """Activity of a process in a trace, with its row."""

    trace: TraceFile
    content: TraceContent
    row: Row
    base_ns: int
    """Unix ns of its host at which the times of the content begin."""


def place_traces(
    files: StepFiles, contents: Sequence[Sequence[ProcessContent]], timeline: Timeline
) -> Traces:
    """Place what each of `files.traces` holds on the timeline's clock."""
    rows, problems = Rows(timeline, axis_of(timeline)), [*files.problems, *_problems(files.traces, contents)]
    placed = list[_Placed]()
    for trace, held in zip(files.traces, contents, strict=True):
        placed += _placed(rows, trace, held, problems)
    rows.number()
    activities = [(one.row.pid, _activity(timeline, one)) for one in placed]
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
    recorded.place(rows)
    events = any(one.content.events for one in held)
    if events and not recorded.rows:  # it was read, and cannot be read again
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
        replica=row.info.replica if sidecar is None else sidecar.artifact.replica,
        topology=None if sidecar is None else sidecar.artifact.topology,
        unaligned=row.unaligned,
        shift_ns=base_ns - offset_ns,
        content=content,
        options={} if sidecar is None else sidecar.options,
        ignored={} if sidecar is None else sidecar.artifact.ignored,
        versions={} if sidecar is None else sidecar.versions,
    )


def _problems(traces: Sequence[TraceFile], contents: Sequence[Sequence[ProcessContent]]) -> list[FileProblem]:
    return [
        FileProblem(file=trace.name, what=what, events=events)
        for trace, held in zip(traces, contents, strict=True)
        for one in held
        for what, events in one.content.problems.items()
    ]


def _read_memory(file: TraceFile, timeline: Timeline) -> MemoryRecord | FileProblem:
    """Return the record of a summary, or the problem of its file."""
    sidecar = file.sidecar
    keys = [process.info.key for process in timeline.processes]
    if sidecar is None or sidecar.process not in keys:
        return FileProblem(file=file.name, what="it is of no process of this step")
    try:
        with gzip.open(file.path) as packed:
            summary = msgspec.json.decode(packed.read(_LARGEST), type=MemorySummary)
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
