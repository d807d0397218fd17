"""Contents of a step's torch traces, each placed on the clock of the capture's owner."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.timeline.activity.content import TraceContent
from stepscope.timeline.activity.memory import MemoryRecord, read_memory
from stepscope.timeline.activity.reading import read_all
from stepscope.timeline.digests import Digests
from stepscope.timeline.execution.near import files_elsewhere
from stepscope.timeline.model import FileProblem, Timeline
from stepscope.timeline.readers.chrome import TraceFields
from stepscope.timeline.readers.installed import Readers
from stepscope.timeline.step.rows import Row, Rows, axis_of, offset_at
from stepscope.timeline.step.traces import StepFiles, TraceFile, find_traces


class TraceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One trace: its process, its content and its place in the step."""

    file: str
    """Relative to the step's folder."""
    name: str
    """Name of the process, the same as in the timeline if it left spans: `actor 0`, `rollout replica 1`."""
    info: ProcessInfo
    process: int | None
    """Index in `Timeline.processes`. None: it left no spans (an engine's worker)."""
    stage: str | None
    """None: the trace is of the whole capture."""
    replica: int | None = None
    """Number of the recorded inference replica. `info` may have none."""
    topology: Mapping[str, int] | None = None
    """Place in the parallel layout of the replica: `{"tp": 1, "dp": 0}`. None: the sidecar does not say."""
    unaligned: str | None
    """Reason why its times cannot be placed in the step. None: they can."""
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


class Traces(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of all traces of a step."""

    activities: tuple[TraceActivity, ...]
    """By process, in the timeline's order of rows."""
    unread: tuple[str, ...]
    """Files that are no torch traces, each with the reason why it is not read."""
    problems: tuple[FileProblem, ...]
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
    """Read the torch traces of a step. Memory does not grow with their size.

    Args:
        path: The step's folder.
        timeline: Timeline of the same folder, with its processes and their clocks.
        on_read: Called with the number of bytes of each read of the files.
        executor: Processes that read them. None: this process reads them.
        digests: Whether traces that were read before need not be read again. The result is the same.
    """
    layout = StepLayout(path)
    without, elsewhere = timeline.earlier_files, files_elsewhere(executor)
    files = find_traces(layout, timeline.run_id, Readers.installed(), without, elsewhere)
    torch = [trace.path for trace in files.traces if trace.reader is None]
    contents = read_all(torch, on_read, executor, Digests(layout) if digests else None)
    return place_traces(files, contents, timeline)


def place_traces(files: StepFiles, contents: Sequence[TraceContent], timeline: Timeline) -> Traces:
    """Place the contents of torch traces, in the order of `files.traces`, on the timeline's clock."""
    torch = [trace for trace in files.traces if trace.reader is None]
    others = [trace.name for trace in files.traces if trace.reader is not None]
    rows = Rows(timeline, axis_of(timeline))
    placed = [_row(rows, trace, content) for trace, content in zip(torch, contents, strict=True)]
    rows.number()
    activities = [
        _activity(timeline, trace, content, row)
        for trace, content, row in zip(torch, contents, placed, strict=True)
    ]
    order = sorted(range(len(activities)), key=lambda at: (placed[at].pid, activities[at].file))
    problems = [*files.problems, *_problems(torch, contents)]
    memory = []
    for file in files.summaries:
        record = read_memory(file, timeline)
        if isinstance(record, FileProblem):
            problems.append(record)
        else:
            memory.append(record)
    return Traces(
        activities=tuple(activities[at] for at in order),
        unread=(*files.unread, *(f"{name}: no torch trace; stepscope merge shows it" for name in others)),
        problems=tuple(problems),
        memory=tuple(memory),
    )


def _row(rows: Rows, trace: TraceFile, content: TraceContent) -> Row:
    fields = TraceFields(base_ns=content.base_ns, distributed=content.distributed, host=content.host)
    reason = None if content.base_ns is not None else "the trace has no baseTimeNanoseconds"
    key = None if trace.sidecar is None else trace.sidecar.process
    return rows.of_trace(trace.whose(fields), key, unaligned=reason)


def _activity(timeline: Timeline, trace: TraceFile, content: TraceContent, row: Row) -> TraceActivity:
    sidecar, base_ns = trace.sidecar, content.base_ns or 0
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


def _problems(traces: Sequence[TraceFile], contents: Sequence[TraceContent]) -> list[FileProblem]:
    return [
        FileProblem(file=trace.name, what=what, events=events)
        for trace, content in zip(traces, contents, strict=True)
        for what, events in content.problems.items()
    ]
