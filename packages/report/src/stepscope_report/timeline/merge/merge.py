"""The merged timeline of a step: its spans, counters and traces in one file, on one clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import StepLayout
from stepscope_report.timeline.load import load_step, span_bytes
from stepscope_report.timeline.merge import Merged, MergedFile, Selection, duplicate_ranks, merged_row
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, JsonEvent, Tracks
from stepscope_report.timeline.merge.reader_events import Drawing
from stepscope_report.timeline.merge.step_events import Drawn
from stepscope_report.timeline.merge.write import (
    Common,
    RowOutcome,
    RowTrace,
    RowTraces,
    TimelineFile,
    Write,
    noted,
    show,
    timeline_file,
    write_row,
    write_texts,
)
from stepscope_report.timeline.model import FileProblem, Timeline, why_incomplete
from stepscope_report.timeline.plain import read_plain
from stepscope_report.timeline.readers.blocks import keep_memory
from stepscope_report.timeline.readers.chrome import ChromeTrace, TraceFields
from stepscope_report.timeline.rows import Recorded, Row, Rows, axis_of
from stepscope_report.timeline.trace_files import StepFiles, TraceFile, find_traces, trace_bytes

NOT_SELECTED = "of another role or rank"
EVERYTHING = Selection()
_BATCH = 1000
"""Number of spans that are in memory as events at once."""
_RESERVE = 1 << 16
"""Number of bytes of the size limit that are reserved for the metadata at the end."""


class Inputs(NamedTuple):
    """Traces of a step's folder, with the facts that a merge needs to place the traces."""

    chrome: list[tuple[TraceFile, TraceFields]]
    recordings: list[Recorded]
    """Files of other formats."""
    unread: list[str]
    problems: list[FileProblem]


class Source(NamedTuple):
    """The timeline and the traces that one merged timeline or archive is made of."""

    timeline: Timeline
    inputs: Inputs
    incomplete: tuple[str, ...] = ()
    """Reasons why the step is not complete."""


class RecordingRows(NamedTuple):
    """A recording of a reader, and the rows in which its events are wanted."""

    recorded: Recorded
    rows: dict[int | None, Row]
    number: int
    """The number of the file among all traces, which is the prefix of its ids."""


class Plan(NamedTuple):
    """Contents of one timeline, in the order in which they are written.

    Writing a plan numbers its tracks and marks its rows as shown, so a plan can be written only once.
    """

    timeline: Timeline
    selection: Selection
    rows: list[Row]
    """All rows, from top to bottom."""
    drawn: Drawn
    traces: list[RowTraces]
    recordings: list[RecordingRows]
    common: Common
    left_out: list[str]
    problems: list[FileProblem]


def step_source(
    path: str | os.PathLike[str], run_id: str | None = None, on_read: Callable[[int], None] | None = None
) -> Source:
    """Read the spans of a captured step, and the beginning of each of its traces. See `merge_step`."""
    keep_memory()
    timeline = load_step(path, run_id=run_id, on_read=on_read)
    files = find_traces(StepLayout(path), timeline.run_id, timeline.earlier_files)
    inputs = inputs_of(files._replace(problems=[]))  # the timeline lists these problems
    return Source(timeline, inputs, why_incomplete(timeline))


def plain_source(paths: Sequence[Path]) -> Source:
    """Read traces that stepscope did not write, from files and folders.

    Raises:
        RecordError: no file contains an event of a trace, or a file is a merged timeline.
    """
    keep_memory()
    step = read_plain(paths)
    files = [trace.path for trace in step.files.traces]
    again = next((path for path in files if files.count(path) > 1), None)
    if again is not None:
        raise RecordError(f"{again} is merged already: give the traces that it was made from")
    return Source(step.timeline, inputs_of(step.files))


def inputs_of(files: StepFiles) -> Inputs:
    """Read the beginning of each trace."""
    chrome = [(trace, ChromeTrace(trace.path).fields()) for trace in files.traces if trace.reader is None]
    recordings = [
        Recorded(trace.reader, trace.found_file, trace.role)
        for trace in files.traces
        if trace.reader is not None
    ]
    return Inputs(chrome, recordings, list(files.unread), list(files.problems))


def plan_merge(source: Source, selection: Selection) -> Plan:
    """Return the plan of a step's timeline. Reads and writes no file.

    Raises:
        ConfigError: the step has none of the selected roles.
    """
    timeline, inputs = source.timeline, source.inputs
    axis = axis_of(timeline, [fields.base_ns or 0 for _, fields in inputs.chrome])
    rows = Rows(timeline, axis)
    traces = [(trace, fields, rows.of_chrome(trace, fields)) for trace, fields in inputs.chrome]
    for recorded in inputs.recordings:
        recorded.place(rows)
    order = rows.number()
    _check_roles(timeline, order, selection)
    limits = selection.limits_ns(timeline.window.start_ns)
    start, end = (None if ns is None else ns - axis.base_ns for ns in limits)
    highest = len(order) + len(inputs.chrome) + len(inputs.recordings)
    common = Common(axis, Cut(start, end), highest, Tracks(row.pid for row in order))
    numbers = count(len(order) + 1)
    left_out = list(inputs.unread)
    return Plan(
        timeline=timeline,
        selection=selection,
        rows=order,
        drawn=Drawn(timeline, rows, axis, selection, common.cut),
        traces=_selected_traces(traces, order, selection, numbers, left_out),
        recordings=_selected_recordings(inputs, selection, numbers, left_out),
        common=common,
        left_out=left_out,
        problems=[*timeline.problems, *inputs.problems],
    )


def _check_roles(timeline: Timeline, rows: Iterable[Row], selection: Selection) -> None:
    roles = {row.info.role for row in rows} | {span.role for span in timeline.spans}
    if selection.roles is not None and roles and not selection.role(*roles):
        allowed = f"names and globs of the step's roles: {', '.join(sorted(roles))}"
        raise ConfigError("roles", ",".join(selection.roles), allowed, "ask for one of these")


def _selected_traces(
    traces: list[tuple[TraceFile, TraceFields, Row]],
    order: list[Row],
    selection: Selection,
    numbers: Iterator[int],
    left_out: list[str],
) -> list[RowTraces]:
    """Return the wanted traces by row, in the order of the rows."""
    chosen = dict[int, list[RowTrace]]()
    firsts = set[int]()
    for trace, fields, row in traces:
        # A row's first trace has the row's number, which late files of other processes do not change.
        number = next(numbers) if row.place in firsts else row.place
        firsts.add(row.place)
        if _is_wanted(trace.role, row, selection):
            row_trace = RowTrace(trace.path, trace.name, number, fields.base_ns)
            chosen.setdefault(row.place, []).append(row_trace)
        else:
            left_out.append(f"{trace.name}: {NOT_SELECTED}")
    return [RowTraces(row, tuple(chosen[row.place])) for row in order if row.place in chosen]


def _selected_recordings(
    inputs: Inputs, selection: Selection, numbers: Iterator[int], left_out: list[str]
) -> list[RecordingRows]:
    recordings = []
    for recorded in inputs.recordings:
        rows = {pid: row for pid, row in recorded.rows.items() if _is_wanted(recorded.role, row, selection)}
        number = next(numbers) if rows else 0
        recordings.append(RecordingRows(recorded, rows, number))
        if len(rows) < len(recorded.rows):
            left_out.append(f"{recorded.file.name}: {'' if not rows else 'what is '}{NOT_SELECTED}")
    return recordings


def _is_wanted(role: str, row: Row, selection: Selection) -> bool:
    return selection.role(role, row.info.role) and selection.rank(row.info.rank)


def bytes_to_read(path: str | os.PathLike[str]) -> int:
    """Return the number of bytes that `merge_step` will read."""
    return span_bytes(path) + trace_bytes(StepLayout(path))


def merge_step(
    path: str | os.PathLike[str],
    *,
    run_id: str | None = None,
    selection: Selection = EVERYTHING,
    to: str | os.PathLike[str] | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Merged:
    """Write the timeline of one captured step, for ui.perfetto.dev and chrome://tracing.

    The memory does not depend on the size of the traces, because only spans are in memory. An interrupted
    merge removes its partial output and keeps the previous timeline.

    Args:
        path: A step's folder.
        run_id: The run to merge if several wrote into the folder, or None for the run that opened it last.
        to: The file to write, or None for `timeline.json.gz` in the step's folder.
        on_read: Called after each read with the number of bytes.

    Raises:
        RecordError: no process left any data, or no process of the requested run.
        ConfigError: the step has none of the selected roles.
        OSError: the file cannot be written.
    """
    source = step_source(path, run_id, on_read)
    return write_merge(source, StepLayout(path).timeline if to is None else Path(to), selection, on_read)


def write_merge(
    source: Source,
    to: Path,
    selection: Selection = EVERYTHING,
    on_read: Callable[[int], None] | None = None,
) -> Merged:
    """Write one timeline. See `merge_step` for the arguments and errors."""
    plan = plan_merge(source, selection)
    with timeline_file(to, plan.common.axis.base_ns) as out:
        written = write_plan(plan, out, on_read)
        written = msgspec.structs.replace(written, incomplete=source.incomplete)
        out.finish(written)
    return written


def write_plan(
    plan: Plan,
    out: TimelineFile,
    on_read: Callable[[int], None] | None,
) -> Merged:
    """Write the events of a plan and return what was written."""
    outcome = RowOutcome()
    ids = FlowIds(0, plan.common.files)
    spans = _write_spans(plan, out.objects, outcome, ids)
    counters = _write_counters(plan, out.objects)
    shares = iter(range(sum(len(row.traces) for row in plan.traces) + len(plan.recordings), 0, -1))
    limit_of = partial(_limit, plan.selection.max_mb, shares)
    for traces in plan.traces:
        launches = plan.drawn.launches(traces.row)
        see = None if launches is None else launches.see
        outcome.add(write_row(traces, plan.common, out, limit_of=limit_of, on_read=on_read, see=see))
    for batch in _batches(plan.drawn.kernels(ids)):
        out.objects(batch)
    for recording in plan.recordings:
        outcome.add(_write_recording(recording, plan, out, limit_of(out)))
        if on_read is not None:
            on_read(recording.recorded.file.path.stat().st_size)
    return merged(plan, spans, counters, outcome)


def _write_spans(plan: Plan, write: Write, outcome: RowOutcome, ids: FlowIds) -> int:
    """Write the spans of a plan's rows, and the arrows between the spans. Return the number of spans."""
    tracks, drawn, written = plan.common.tracks, plan.drawn, 0
    for row in plan.rows:
        _write_own(drawn.path(row, tracks), row, tracks, write)
        events = chain(
            drawn.of(row, tracks),
            drawn.consumed(row, tracks),
            drawn.stalls(row, tracks),
            drawn.passes(row, tracks),
        )
        written += _write_own(events, row, tracks, write)
    for batch in _batches(chain(tracks.take(), drawn.arrows(ids))):
        write(batch)
    if drawn.outside:
        outcome.left_out.append(f"{drawn.outside} spans outside the selected time")
    return written


def _write_counters(plan: Plan, write: Write) -> int:
    """Write the counters of a plan's rows, and return the number of values."""
    tracks = plan.common.tracks
    return sum(_write_own(plan.drawn.counters(row), row, tracks, write) for row in plan.rows)


def _write_own(events: Iterable[JsonEvent], row: Row, tracks: Tracks, write: Write) -> int:
    written = 0
    for batch in _batches(events):
        show(row, tracks, write)
        write(batch)
        written += len(batch)
    return written


def _write_recording(
    recording: RecordingRows, plan: Plan, out: TimelineFile, limit: int | None
) -> RowOutcome:
    outcome, common, name = RowOutcome(), plan.common, recording.recorded.file.name
    if recording.rows:
        ids = FlowIds(recording.number, common.files)
        drawing = Drawing(recording.recorded, recording.rows, ids, common.tracks, common.axis, common.cut)
        outcome.left_out += write_texts(
            name, drawing.texts(), drawing, lambda: drawing.touched, common.tracks, out, limit
        )
        counts = sorted(drawing.events.items())
        outcome.files += [MergedFile(file=name, row=pid, events=events) for pid, events in counts]
    outcome.problems += noted(name, recording.recorded.notes)
    return outcome


def _limit(max_mb: float | None, shares: Iterator[int], out: TimelineFile) -> int | None:
    """Return the file size at which the next trace is cut, or None for no limit.

    The remaining traces share the remaining bytes equally.
    """
    share = next(shares)
    if max_mb is None:
        return None
    written = out.flush()
    return written + max(0, int(max_mb * 1_000_000) - _RESERVE - written) // share


def merged(plan: Plan, spans: int, counters: int, outcome: RowOutcome) -> Merged:
    """Return the record of what was written for a plan."""
    timeline = plan.timeline
    shown = [row for row in plan.rows if row.shown]
    unaligned = [
        FileProblem(file=row.name, what=f"unaligned: {row.unaligned}")
        for row in shown
        if row.unaligned is not None
    ]
    return Merged(
        step=timeline.step,
        run_id=timeline.run_id,
        base_ns=plan.common.axis.base_ns,
        window_ns=(timeline.window.start_ns, timeline.window.end_ns),
        rows=tuple(map(merged_row, shown)),
        files=tuple(outcome.files),
        spans=spans,
        counters=counters,
        selection=plan.selection.words(),
        left_out=(*plan.left_out, *outcome.left_out),
        problems=(*plan.problems, *outcome.problems, *unaligned, *duplicate_ranks(shown)),
    )


def _batches(events: Iterable[JsonEvent]) -> Iterator[list[JsonEvent]]:
    """Yield short lists of events, which take little memory."""
    remaining = iter(events)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
