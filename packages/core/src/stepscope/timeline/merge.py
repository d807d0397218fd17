"""One file of everything that a step left: spans, traces, and how they were put on one clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.timeline.drawn import Drawn
from stepscope.timeline.ids import FlowIds
from stepscope.timeline.load import load_step, span_bytes
from stepscope.timeline.model import FileProblem, ProcessClock, Timeline
from stepscope.timeline.perfetto.write import PerfettoFile, perfetto_file
from stepscope.timeline.place import Place
from stepscope.timeline.quick import Cut
from stepscope.timeline.readers.blocks import Notes
from stepscope.timeline.readers.chrome import ChromeTrace, TraceFields
from stepscope.timeline.readers.installed import Readers
from stepscope.timeline.recordings import Drawing, Recorded
from stepscope.timeline.rewrite import Rewriter, Text
from stepscope.timeline.rows import Row, Rows, axis_of
from stepscope.timeline.selection import Selection
from stepscope.timeline.traces import TraceFile, find_traces, trace_bytes
from stepscope.timeline.tracks import Tracks, row_metadata
from stepscope.timeline.write import TimelineFile, timeline_file

Format: TypeAlias = Literal["json", "perfetto"]
Output: TypeAlias = TimelineFile | PerfettoFile

_EVERYTHING = Selection()
_KEPT = 8 << 20
"""Once that much was allocated and freed, glibc keeps freed memory, up to twice that. Else every block of a
file is memory that the kernel has to clear anew: a fifth of a merge's time."""
_RESERVE = 1 << 16
"""Bytes of the limit on size kept for what is said at the end."""
_NOT_ASKED = "of another role or rank"


class MergedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the timeline."""

    pid: int
    """In the timeline."""
    name: str
    role: str
    rank: int | None
    replica: int | None
    host: str
    native_pid: int | None
    alignment: str
    """As `ProcessClock.alignment`."""
    uncertainty_ns: int | None
    """Its times are true within +- this against the owner's. None: unknown."""
    offset_ns: int = 0
    """What its wall clock was ahead at the opening; taken out."""
    drift_ppm: float | None = None
    """How fast it gained on the owner's; taken out. None: not known."""
    matched: int = 0
    """How many collectives that rests on."""
    note: str | None = None
    """Why collectives do not say more of its clock."""
    reason: str | None = None
    """Why it is unaligned."""
    shift_ns: int = 0
    """Added to the times of an unaligned row that are nowhere near the step, so that it is shown at all: from
    a second behind the step's end on. 0: it stands where its own clock says."""


class MergedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that went into the timeline."""

    file: str
    row: int
    """Its row's pid."""
    events: int
    """Written."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and what was not. It stands in the file as well, as `stepscope`."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Unix ns on the owner's clock: an event's time is this + `ts` * 1000."""
    window_ns: tuple[int, int]
    """The step, unix ns."""
    rows: tuple[MergedRow, ...]
    files: tuple[MergedFile, ...]
    spans: int
    """Written."""
    selection: dict[str, object]
    """What narrowed it."""
    left_out: tuple[str, ...]
    """What the selection, or the lack of a reader, left out."""
    problems: tuple[FileProblem, ...]
    """What was broken or missing; the rest of each file was used."""

    @property
    def events(self) -> int:
        return self.spans + sum(file.events for file in self.files)


def merge_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes of files `merge_step` will read."""
    return span_bytes(path) + trace_bytes(StepLayout(path))


def merge_step(
    path: str | os.PathLike[str],
    *,
    run_id: str | None = None,
    selection: Selection = _EVERYTHING,
    to: str | os.PathLike[str] | None = None,
    to_format: Format = "json",
    on_read: Callable[[int], None] | None = None,
) -> Merged:
    """Writes the timeline of one captured step, for ui.perfetto.dev and chrome://tracing.

    In bounded memory, whatever the size of the traces: only spans are held. Nothing is left of the file when
    this raises or is interrupted, and a file that was there stays.

    Args:
        path: A step's folder.
        run_id: Which run, where several wrote into the folder. None: the one that opened it last.
        to: Where to write. None: `timeline.json.gz`, or `timeline.pftrace.gz`, in the step's folder.
        to_format: `json`: Chrome's trace events, gzip. `perfetto`: Perfetto's own, gzip if the name ends so.
        on_read: Called with a number of bytes each time that many more of the files were read.

    Raises:
        RecordError: no process of a capture left anything, or none of the run that was asked for.
        OSError: the disk does not let us.
    """
    bytes(_KEPT)
    layout = StepLayout(path)
    merge = _Merge(layout, load_step(path, run_id=run_id, on_read=on_read), selection, on_read)
    target = Path(to) if to is not None else layout.perfetto if to_format == "perfetto" else layout.timeline
    with (perfetto_file if to_format == "perfetto" else timeline_file)(target, merge.axis.base_ns) as out:
        merge.write(out)
        merged = merge.merged(out.left_out())
        out.finish(merged)
    return merged


class _Merge:
    def __init__(
        self,
        layout: StepLayout,
        timeline: Timeline,
        selection: Selection,
        on_read: Callable[[int], None] | None,
    ) -> None:
        found = find_traces(layout, timeline.run_id, Readers.installed(), timeline.earlier_files)
        fields = {each.path: ChromeTrace(each.path).fields() for each in found.traces if each.reader is None}
        self.axis = axis_of(timeline, [said.base_ns for said in fields.values() if said.base_ns is not None])
        self._timeline = timeline
        self._selection = selection
        self._on_read = on_read
        self._rows = Rows(timeline, self.axis)
        self._problems = [*timeline.problems, *found.problems]
        self._left_out = found.unread
        self._traces = [
            self._row_of(trace, fields[trace.path]) for trace in found.traces if trace.reader is None
        ]
        self._recorded = [
            (trace, Recorded(trace.reader, trace.found, self._rows, trace.role))
            for trace in found.traces
            if trace.reader is not None
        ]
        self._order = self._rows.number()
        limits = selection.limits_ns(timeline.window.start_ns)
        start, end = (None if ns is None else ns - self.axis.base_ns for ns in limits)
        self._cut = Cut(start, end)
        self._tracks = Tracks(row.pid for row in self._order)
        self._ids = partial(FlowIds, files=len(found.traces))
        self._drawn = Drawn(timeline, self._rows, self.axis, selection, self._cut)
        self._spans = 0
        self._files: list[MergedFile] = []

    def _row_of(self, trace: TraceFile, fields: TraceFields) -> tuple[TraceFile, TraceFields, Row]:
        key = None if trace.sidecar is None else trace.sidecar.process
        reason = None if fields.base_ns is not None else "the trace has no baseTimeNanoseconds"
        row = self._rows.of_trace(trace.whose(fields), key, unaligned=reason)
        row.seen_pid = row.seen_pid or fields.pid
        return trace, fields, row

    def write(self, out: Output) -> None:
        for row in self._order:
            spans = [*self._drawn.of(row, self._tracks), *self._drawn.consumed(row, self._tracks)]
            if spans:
                self._show(row, out)
                out.objects(spans)
                self._spans += len(spans)
        out.objects(list(self._drawn.arrows(self._ids(0))))
        if self._drawn.outside:
            self._left_out.append(f"{self._drawn.outside} spans outside the time that was asked for")
        chosen = [each for each in self._traces if self._chosen(each[0], each[2])]
        chosen.sort(key=lambda each: each[2].place)
        left = len(chosen) + len(self._recorded)
        for number, (trace, fields, row) in enumerate(chosen):
            self._write_trace(out, number + 1, trace, fields, row, self._limit(out, left - number))
        for number, (trace, recorded) in enumerate(self._recorded, len(chosen)):
            self._write_recorded(out, number + 1, trace, recorded, self._limit(out, left - number))

    def _chosen(self, trace: TraceFile, row: Row) -> bool:
        chosen = self._wanted(trace, row)
        if not chosen:
            self._left_out.append(f"{trace.name}: {_NOT_ASKED}")
        return chosen

    def _wanted(self, trace: TraceFile, row: Row) -> bool:
        return self._selection.role(trace.role, row.info.role) and self._selection.rank(row.info.rank)

    def _limit(self, out: Output, left: int) -> int | None:
        """The size of the file at which the next trace ends: what is left is shared equally."""
        if self._selection.max_mb is None:
            return None
        written = out.settle()
        return written + max(0, int(self._selection.max_mb * 1_000_000) - _RESERVE - written) // left

    def _write_trace(
        self,
        out: Output,
        number: int,
        trace: TraceFile,
        fields: TraceFields,
        row: Row,
        limit: int | None,
    ) -> None:
        file = ChromeTrace(trace.path)
        place = Place(row, fields.base_ns, self.axis)
        rewriter = Rewriter(row, place, self._ids(number), self._tracks, self._cut, file.notes)
        texts = file.texts(rewriter.rewrite, self._on_read)
        self._write_texts(out, trace, texts, rewriter, lambda: [row], limit)
        self._files.append(MergedFile(file=trace.name, row=row.pid, events=rewriter.written))
        self._note(trace, file.notes)

    def _write_recorded(
        self, out: Output, number: int, trace: TraceFile, recorded: Recorded, limit: int | None
    ) -> None:
        rows = {pid: row for pid, row in recorded.rows.items() if self._wanted(trace, row)}
        if rows:
            drawing = Drawing(recorded, rows, self._ids(number), self._tracks, self.axis, self._cut)
            self._write_texts(out, trace, drawing.texts(), drawing, lambda: drawing.touched, limit)
            drawn = sorted(drawing.events.items())
            self._files += [MergedFile(file=trace.name, row=pid, events=count) for pid, count in drawn]
        if len(rows) < len(recorded.rows):
            self._left_out.append(f"{trace.name}: {'' if not rows else 'what is '}{_NOT_ASKED}")
        if self._on_read is not None:
            self._on_read(trace.path.stat().st_size)
        self._note(trace, recorded.notes)

    def _write_texts(
        self,
        out: Output,
        trace: TraceFile,
        texts: Iterable[Text],
        counts: Rewriter | Drawing,
        rows: Callable[[], list[Row]],
        limit: int | None,
    ) -> None:
        """A file's events, as far as the limit goes. `rows` gives those that they are in so far."""
        latest = 0
        for text in texts:
            if limit is not None and out.settle() + latest > limit:
                self._left_out.append(
                    f"{trace.name}: what follows its first {counts.written} events, for its size"
                )
                break
            if text:
                for row in rows():
                    self._show(row, out)
                before = out.written
                out.events(text)
                latest = 0 if limit is None else out.settle() - before
        out.objects(self._tracks.take() + self._tracks.take_unnamed())
        if counts.outside:
            self._left_out.append(
                f"{trace.name}: {counts.outside} events outside the time that was asked for"
            )

    def _note(self, trace: TraceFile, notes: Notes) -> None:
        counts = notes.counts.items()
        self._problems += [FileProblem(file=trace.name, what=what, events=events) for what, events in counts]

    def _show(self, row: Row, out: Output) -> None:
        """Writes what is to be known of the row before its first event."""
        if not row.shown:
            row.shown = True
            out.objects(list(row_metadata(row)))
        out.objects(self._tracks.take())

    def merged(self, left_out: list[str]) -> Merged:
        timeline = self._timeline
        shown = [row for row in self._order if row.shown]
        unaligned = [(row.name, row.unaligned) for row in shown if row.unaligned is not None]
        self._problems += [FileProblem(file=name, what=f"unaligned: {why}") for name, why in unaligned]
        self._problems += _twice(shown)
        return Merged(
            step=timeline.step,
            run_id=timeline.run_id,
            base_ns=self.axis.base_ns,
            window_ns=(timeline.window.start_ns, timeline.window.end_ns),
            rows=tuple(map(_merged_row, shown)),
            files=tuple(self._files),
            spans=self._spans,
            selection=self._selection.words(),
            left_out=(*self._left_out, *left_out),
            problems=tuple(self._problems),
        )


def _merged_row(row: Row) -> MergedRow:
    info, clock = row.info, None if row.clock is None or row.unaligned is not None else row.clock.clock
    return MergedRow(
        pid=row.pid,
        name=row.name,
        role=info.role,
        rank=info.rank,
        replica=info.replica,
        host=info.host,
        native_pid=info.pid or None,
        alignment="unaligned" if clock is None else _alignment(row, clock),
        uncertainty_ns=None if clock is None else clock.uncertainty_ns,
        offset_ns=0 if clock is None else clock.offset_ns,
        drift_ppm=None if clock is None else clock.drift_ppm,
        matched=0 if clock is None else clock.matched,
        note=None if row.clock is None else row.clock.clock.note,
        reason=row.unaligned,
        shift_ns=row.shift_ns or 0,
    )


def _twice(rows: Iterable[Row]) -> Iterator[FileProblem]:
    """Ranks that several processes say they are."""
    ranks: dict[tuple[str, int | None, int], set[str]] = {}
    for row in rows:
        if row.info.rank is not None:
            where = f"pid {row.info.pid or 'unknown'} on {row.info.host}"
            ranks.setdefault((row.info.role, row.info.replica, row.info.rank), set()).add(where)
    for (role, replica, rank), processes in ranks.items():
        if len(processes) > 1:
            whose = role if replica is None else f"{role} replica {replica}"
            what = f"several processes say they are this rank; each has a row: {', '.join(sorted(processes))}"
            yield FileProblem(file=f"{whose} rank {rank}", what=what)


def _alignment(row: Row, clock: ProcessClock) -> str:
    """What is not the owner itself has only its clock."""
    return "same host" if clock.alignment == "owner" and row.process is None else clock.alignment
