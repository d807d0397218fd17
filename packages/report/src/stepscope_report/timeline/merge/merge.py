"""One file of everything that a step left: spans, traces, and how they were put on one clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

import msgspec

from stepscope.files.layout import StepLayout
from stepscope_report.timeline.completeness import gaps
from stepscope_report.timeline.merge.ids import FlowIds
from stepscope_report.timeline.merge.merged import Merged, MergedFile, duplicate_ranks, merged_row
from stepscope_report.timeline.merge.plan import (
    Plan,
    Recording,
    Sources,
    plan_merge,
    read_sources,
    sources_of,
)
from stepscope_report.timeline.merge.reader_events import Drawing
from stepscope_report.timeline.merge.row_writer import RowOutcome, Write, noted, show, write_row, write_texts
from stepscope_report.timeline.merge.tracks import Event, Tracks
from stepscope_report.timeline.merge.write import TimelineFile, timeline_file
from stepscope_report.timeline.model import FileProblem, Timeline
from stepscope_report.timeline.readers.blocks import keep_memory
from stepscope_report.timeline.selection import Selection
from stepscope_report.timeline.step.load import load_step, span_bytes
from stepscope_report.timeline.step.plain import read_plain
from stepscope_report.timeline.step.rows import Row
from stepscope_report.timeline.step.traces import trace_bytes

EVERYTHING = Selection()
_BATCH = 1000
"""Spans that are held as events at once."""
_RESERVE = 1 << 16
"""Bytes of the limit on size that are kept for the metadata at the end."""


def merge_bytes(path: str | os.PathLike[str]) -> int:
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

    Memory is bounded whatever the size of the traces: only spans are held. If interrupted, it removes its
    partial output and keeps any previous timeline.

    Args:
        path: A step's folder.
        run_id: Which run, if several wrote into the folder, or None for the one that opened it last.
        to: Where to write, or None for `timeline.json.gz` in the step's folder.
        on_read: Called with a number of bytes each time that many more of the files were read.

    Raises:
        RecordError: no process of a capture left anything, or none of the requested run.
        ConfigError: the step has none of the selected roles.
        OSError: the file cannot be written.
    """
    keep_memory()
    layout = StepLayout(path)
    timeline = load_step(path, run_id=run_id, on_read=on_read)
    sources = read_sources(layout, timeline)
    target = layout.timeline if to is None else Path(to)
    return _merge(timeline, sources, selection, target, on_read, gaps(timeline))


def merge_plain(
    paths: Sequence[Path],
    to: Path,
    *,
    selection: Selection = EVERYTHING,
    on_read: Callable[[int], None] | None = None,
) -> Merged:
    """Write one timeline of traces that stepscope did not write: files, and folders that hold them.

    Raises:
        RecordError: none of them holds an event of a trace.
        ConfigError: none has one of the selected roles.
        OSError: the file cannot be written.
    """
    keep_memory()
    step = read_plain(paths)
    return _merge(step.timeline, sources_of(step.files), selection, to, on_read)


def _merge(
    timeline: Timeline,
    sources: Sources,
    selection: Selection,
    target: Path,
    on_read: Callable[[int], None] | None,
    incomplete: tuple[str, ...] = (),
) -> Merged:
    plan = plan_merge(timeline, sources, selection)
    with timeline_file(target, plan.common.axis.base_ns) as out:
        written = _write(plan, out, on_read)
        written = msgspec.structs.replace(written, incomplete=incomplete)
        out.finish(written)
    return written


def _write(
    plan: Plan,
    out: TimelineFile,
    on_read: Callable[[int], None] | None,
) -> Merged:
    """Write the events of a plan and return what was written."""
    outcome = RowOutcome()
    spans = write_spans(plan, out.objects, outcome)
    counters = write_counters(plan, out.objects)
    shares = iter(range(sum(len(row.traces) for row in plan.traces) + len(plan.recordings), 0, -1))
    limit_of = partial(_limit, plan.selection.max_mb, shares)
    for traces in plan.traces:
        outcome.add(write_row(traces, plan.common, out, limit_of=limit_of, on_read=on_read))
    for recording in plan.recordings:
        outcome.add(_write_recording(recording, plan, out, limit_of(out)))
        if on_read is not None:
            on_read(recording.recorded.file.path.stat().st_size)
    return merged(plan, spans, counters, outcome)


def write_spans(plan: Plan, write: Write, outcome: RowOutcome) -> int:
    """Write the spans of a plan's rows, and the arrows between them. Return their number."""
    tracks, drawn, written = plan.common.tracks, plan.drawn, 0
    for row in plan.rows:
        _write_own(drawn.path(row, tracks), row, tracks, write)
        events = chain(drawn.of(row, tracks), drawn.consumed(row, tracks), drawn.stalls(row, tracks))
        written += _write_own(events, row, tracks, write)
    for batch in _batches(chain(tracks.take(), drawn.arrows(FlowIds(0, plan.common.files)))):
        write(batch)
    if drawn.outside:
        outcome.left_out.append(f"{drawn.outside} spans outside the selected time")
    return written


def write_counters(plan: Plan, write: Write) -> int:
    """Write the counters of a plan's rows, and return the number of values."""
    tracks = plan.common.tracks
    return sum(_write_own(plan.drawn.counters(row), row, tracks, write) for row in plan.rows)


def _write_own(events: Iterable[Event], row: Row, tracks: Tracks, write: Write) -> int:
    written = 0
    for batch in _batches(events):
        show(row, tracks, write)
        write(batch)
        written += len(batch)
    return written


def _write_recording(recording: Recording, plan: Plan, out: TimelineFile, limit: int | None) -> RowOutcome:
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
    """Return the size of the file at which the next trace ends: what is left is shared equally."""
    share = next(shares)
    if max_mb is None:
        return None
    written = out.flush()
    return written + max(0, int(max_mb * 1_000_000) - _RESERVE - written) // share


def merged(plan: Plan, spans: int, counters: int, outcome: RowOutcome) -> Merged:
    """Return the record of what was written of a plan."""
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


def _batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield short lists of events, so that their memory does not matter."""
    remaining = iter(events)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
