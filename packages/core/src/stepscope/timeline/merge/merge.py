"""One file of everything that a step left: spans, traces, and how they were put on one clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from stepscope.errors import ConfigError
from stepscope.files.layout import StepLayout
from stepscope.timeline.merge.earlier import Earlier, Kept, earlier_rows, made_of
from stepscope.timeline.merge.ids import FlowIds
from stepscope.timeline.merge.merged import Merged, MergedFile, MergedRow
from stepscope.timeline.merge.reader_events import Drawing, Recorded
from stepscope.timeline.merge.row_writer import (
    Common,
    RowTrace,
    RowTraces,
    Told,
    TraceTexts,
    noted,
    show,
    write_row,
)
from stepscope.timeline.merge.span_events import Drawn
from stepscope.timeline.merge.template import Cut
from stepscope.timeline.merge.tracks import Event, Tracks
from stepscope.timeline.merge.workers import Made, clear, idle_cores, size_of, workers, workers_for
from stepscope.timeline.merge.write import Stored, TimelineFile, timeline_file
from stepscope.timeline.model import FileProblem, ProcessClock, Timeline
from stepscope.timeline.readers.blocks import keep_memory
from stepscope.timeline.readers.chrome import ChromeTrace, TraceFields
from stepscope.timeline.readers.installed import Readers
from stepscope.timeline.selection import Selection
from stepscope.timeline.step.load import load_step, span_bytes
from stepscope.timeline.step.rows import Row, Rows, axis_of
from stepscope.timeline.step.traces import TraceFile, find_traces, trace_bytes

if TYPE_CHECKING:
    from stepscope.timeline.perfetto.write import PerfettoFile

Format: TypeAlias = Literal["json", "perfetto"]
Output: TypeAlias = "TimelineFile | PerfettoFile"

_EVERYTHING = Selection()
_BATCH = 1000
"""Spans that are held as events at once."""
_COMPRESSED = 12
"""Times that JSON of traces gets smaller."""
_RESERVE = 1 << 16
"""Bytes of the limit on size kept for what is said at the end."""
_NOT_ASKED = "of another role or rank"


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
        ConfigError: the step has none of the roles that were asked for.
        OSError: the disk does not let us.
    """
    keep_memory()
    layout = StepLayout(path)
    merge = _Merge(layout, load_step(path, run_id=run_id, on_read=on_read), selection, on_read)
    merge.check_roles()
    target = Path(to) if to is not None else layout.perfetto if to_format == "perfetto" else layout.timeline
    there = target if to is None or target.exists() else layout.timeline
    with earlier_rows(there) as earlier, _output(target, to_format, merge.axis.base_ns) as out:
        merge.write(out, target, earlier)
        merged = merge.merged(out.left_out())
        out.finish(merged)
    return merged


def _output(path: Path, to_format: Format, base_ns: int) -> AbstractContextManager[Output]:
    if to_format == "json":
        return timeline_file(path, base_ns)
    from stepscope.timeline.perfetto.write import perfetto_file  # not when a timeline is written as JSON

    return perfetto_file(path, base_ns)


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
        self.axis = axis_of(timeline, [said.base_ns or 0 for said in fields.values()])
        self._timeline = timeline
        self._selection = selection
        self._on_read = on_read
        self._rows = Rows(timeline, self.axis)
        self._problems = [*timeline.problems, *found.problems]
        self._left_out = found.unread
        traces = [self._row_of(trace, fields[trace.path]) for trace in found.traces if trace.reader is None]
        self._recorded = [
            (trace, Recorded(trace.reader, trace.found, self._rows, trace.role))
            for trace in found.traces
            if trace.reader is not None
        ]
        self._order = self._rows.number()
        limits = selection.limits_ns(timeline.window.start_ns)
        start, end = (None if ns is None else ns - self.axis.base_ns for ns in limits)
        self._tracks = Tracks(row.pid for row in self._order)
        highest = len(self._order) + len(found.traces)
        self._common = Common(self.axis, Cut(start, end), highest, self._tracks)
        self._numbers = count(len(self._order) + 1)
        self._chosen = self._chosen_rows(traces)
        places = {row.place for _, recorded in self._recorded for row in recorded.rows.values()}
        self._ours = {number for number, of in enumerate(self._chosen) if of.row.place in places}
        """Rows, by their number, that readers will add to."""
        self._drawn = Drawn(timeline, self._rows, self.axis, selection, self._common.cut)
        self._spans = 0
        self._rows_joined = 0
        self._files: list[MergedFile] = []

    def _row_of(self, trace: TraceFile, fields: TraceFields) -> tuple[TraceFile, TraceFields, Row]:
        key = None if trace.sidecar is None else trace.sidecar.process
        reason = None if fields.base_ns is not None else "the trace has no baseTimeNanoseconds"
        row = self._rows.of_trace(trace.whose(fields), key, unaligned=reason)
        row.seen_pid = row.seen_pid or fields.pid
        return trace, fields, row

    def check_roles(self) -> None:
        there = {row.info.role for row in self._order} | {span.role for span in self._timeline.spans}
        wanted = self._selection.roles
        if wanted is not None and there and not self._selection.role(*there):
            allowed = f"names and globs of the step's roles: {', '.join(sorted(there))}"
            raise ConfigError("roles", ",".join(wanted), allowed, "ask for one of these")

    def write(self, out: Output, target: Path, earlier: Earlier) -> None:
        """With what an earlier merge wrote, and the help of workers."""
        for row in self._order:
            spans = chain(self._drawn.of(row, self._tracks), self._drawn.consumed(row, self._tracks))
            for batch in _batches(spans):
                show(row, self._tracks, out)
                out.objects(batch)
                self._spans += len(batch)
        for batch in _batches(chain(self._tracks.take(), self._drawn.arrows(FlowIds(0, self._common.files)))):
            out.objects(batch)
        if self._drawn.outside:
            self._left_out.append(f"{self._drawn.outside} spans outside the time that was asked for")
        left = iter(range(sum(len(of.traces) for of in self._chosen) + len(self._recorded), 0, -1))
        limit_of = partial(self._limit, out, left)
        if isinstance(out, TimelineFile) and self._selection.max_mb is None:
            self._write_shared(out, target, earlier)
        else:
            for of in self._chosen:
                told = write_row(of, self._common, out, limit_of=limit_of, on_read=self._on_read)
                self._note(of, told)
        for trace, recorded in self._recorded:
            self._write_recorded(out, trace, recorded, limit_of())

    def _write_shared(self, out: TimelineFile, target: Path, earlier: Earlier) -> None:
        """With what an earlier merge wrote, and the help of workers: where no trace limits the next one."""
        keys = [
            None if number in self._ours else made_of(of, self._common)
            for number, of in enumerate(self._chosen)
        ]
        kept = {number: found for number, key in enumerate(keys) if (found := earlier.of(key)) is not None}
        ours = {*self._ours, *kept}
        shares = [
            sum(_weight(trace.path) for trace in of.traces)
            for number, of in enumerate(self._chosen)
            if number not in ours
        ]
        count = workers_for(shares, idle_cores())
        with workers(self._chosen, self._common, target, count, ours, self._on_read) as made_by_worker:
            for number, (of, key) in enumerate(zip(self._chosen, keys, strict=True)):
                done = self._joined(out, of, kept[number], earlier) if number in kept else None
                made = made_by_worker(number) if done is None else None
                if made is not None:
                    done = _appended(out, *made)
                elif done is None:
                    done = out.stored(partial(write_row, of, self._common, out, on_read=self._on_read))
                told, stored = done
                self._note(of, told)
                if key is not None and not told.problems:  # what could not be read may be readable next time
                    out.rows.append(Kept(made_of=key, stored=stored, told=told))

    def _joined(
        self, out: TimelineFile, of: RowTraces, kept: Kept, earlier: Earlier
    ) -> tuple[Told, Stored] | None:
        """What an earlier merge wrote. None: it has to be written anew."""
        stored = earlier.join(kept, out)
        if stored is None:
            return None
        self._rows_joined += 1
        if self._on_read is not None:
            self._on_read(sum(size_of(trace.path) for trace in of.traces))
        return kept.told, stored

    def _chosen_rows(self, traces: list[tuple[TraceFile, TraceFields, Row]]) -> list[RowTraces]:
        """Those that are wanted, in the order of their rows."""
        chosen = dict[int, list[RowTrace]]()
        firsts = set[int]()
        for trace, fields, row in traces:
            # So a file that comes later, of a process that has none, leaves the others' numbers.
            number = next(self._numbers) if row.place in firsts else row.place
            firsts.add(row.place)
            if self._wanted(trace, row):
                of = chosen.setdefault(row.place, [])
                of.append(
                    RowTrace(
                        path=os.fsencode(trace.path), name=trace.name, number=number, base_ns=fields.base_ns
                    )
                )
            else:
                self._left_out.append(f"{trace.name}: {_NOT_ASKED}")
        return [RowTraces(row, tuple(chosen[row.place])) for row in self._order if row.place in chosen]

    def _wanted(self, trace: TraceFile, row: Row) -> bool:
        return self._selection.role(trace.role, row.info.role) and self._selection.rank(row.info.rank)

    def _limit(self, out: Output, left: Iterator[int]) -> int | None:
        """The size of the file at which the next trace ends: what is left is shared equally."""
        share = next(left)
        if self._selection.max_mb is None:
            return None
        written = out.settle()
        return written + max(0, int(self._selection.max_mb * 1_000_000) - _RESERVE - written) // share

    def _write_recorded(self, out: Output, trace: TraceFile, recorded: Recorded, limit: int | None) -> None:
        rows = {pid: row for pid, row in recorded.rows.items() if self._wanted(trace, row)}
        if rows:
            ids = FlowIds(next(self._numbers), self._common.files)
            drawing = Drawing(recorded, rows, ids, self._tracks, self.axis, self._common.cut)
            texts = TraceTexts(trace.name, drawing.texts(), drawing, lambda: drawing.touched)
            self._left_out += texts.write(out, self._tracks, limit)
            drawn = sorted(drawing.events.items())
            self._files += [MergedFile(file=trace.name, row=pid, events=count) for pid, count in drawn]
        if len(rows) < len(recorded.rows):
            self._left_out.append(f"{trace.name}: {'' if not rows else 'what is '}{_NOT_ASKED}")
        if self._on_read is not None:
            self._on_read(trace.path.stat().st_size)
        self._problems += noted(trace.name, recorded.notes)

    def _note(self, of: RowTraces, told: Told) -> None:
        of.row.shown, of.row.shift_ns = told.shown, told.shift_ns
        self._left_out += told.left_out
        self._files += told.files
        self._problems += told.problems

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
            joined=self._rows_joined,
        )


def _appended(out: TimelineFile, made: Made, text: Path) -> tuple[Told, Stored]:
    """What a worker wrote."""
    with text.open("rb") as source:
        stored = out.append(made.piece, source)
    clear(text)
    return made.told, stored


def _batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield lists of events that are small enough for memory to be no matter."""
    remaining = iter(events)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def _weight(path: bytes) -> int:
    """About how many bytes the file is, or would be when compressed."""
    size = size_of(path)
    return size if path.endswith(b".gz") else size // _COMPRESSED


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
