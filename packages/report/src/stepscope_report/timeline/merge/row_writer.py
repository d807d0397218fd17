"""Writing of the Chrome traces of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from stepscope_report.timeline.merge.mapping import Cut, FlowIds, Place
from stepscope_report.timeline.merge.merged import MergedFile
from stepscope_report.timeline.merge.rewrite import Rewriter, Text
from stepscope_report.timeline.merge.tracks import Event, Tracks, row_metadata
from stepscope_report.timeline.merge.write import TimelineFile
from stepscope_report.timeline.model import FileProblem
from stepscope_report.timeline.readers.blocks import Notes
from stepscope_report.timeline.readers.chrome import ChromeTrace
from stepscope_report.timeline.step.rows import Axis, Row

if TYPE_CHECKING:
    from stepscope_report.timeline.merge.reader_events import Drawing

Write: TypeAlias = Callable[[list[Event]], None]
"""Writes events that are not JSON yet."""


class RowTrace(NamedTuple):
    path: Path
    name: str
    """Path of the trace, relative to the step's folder."""
    number: int
    """Number among all traces of the step, the prefix of its ids. A row's first trace has the row's place."""
    base_ns: int | None


class RowTraces(NamedTuple):
    """The Chrome traces of a row, in the order in which they are written."""

    row: Row
    traces: tuple[RowTrace, ...]


class Common(NamedTuple):
    """Values that all rows of a merge share."""

    axis: Axis
    cut: Cut
    files: int
    """The highest number of a trace."""
    tracks: Tracks


class RowOutcome(msgspec.Struct):
    """Results of writing traces: their counts, their problems, and what the selection left out."""

    files: list[MergedFile] = []
    problems: list[FileProblem] = []
    left_out: list[str] = []

    def add(self, other: RowOutcome) -> None:
        self.files += other.files
        self.problems += other.problems
        self.left_out += other.left_out


def write_row(
    traces: RowTraces,
    common: Common,
    out: TimelineFile,
    *,
    limit_of: Callable[[TimelineFile], int | None],
    on_read: Callable[[int], None] | None,
    see: Callable[[Text], None] | None = None,
) -> RowOutcome:
    """Write the traces of a row, in their order.

    Args:
        limit_of: Called with `out` before each trace: the size of the file at which it ends.
        on_read: Called with a number of bytes each time that many more of the files were read.
        see: Called with the events before they are written.
    """
    row, outcome = traces.row, RowOutcome()
    for trace in traces.traces:
        file = ChromeTrace(trace.path)
        place = Place(row, trace.base_ns, common.axis)
        ids = FlowIds(trace.number, common.files)
        rewriter = Rewriter(row, place, ids, common.tracks, common.cut, file.notes)
        texts = file.texts(rewriter.rewrite, on_read)
        if see is not None:
            texts = _seen(texts, see)
        outcome.left_out += write_texts(
            trace.name, texts, rewriter, lambda: [row], common.tracks, out, limit_of(out)
        )
        written, crossed = rewriter.written, rewriter.lines.moved
        outcome.files.append(MergedFile(file=trace.name, row=row.pid, events=written, crossing=crossed))
        outcome.problems += noted(trace.name, file.notes)
    return outcome


def _seen(texts: Iterable[Text], see: Callable[[Text], None]) -> Iterator[Text]:
    for text in texts:
        see(text)
        yield text


def write_texts(
    name: str,
    texts: Iterable[Text],
    counts: Rewriter | Drawing,
    rows: Callable[[], list[Row]],
    tracks: Tracks,
    out: TimelineFile,
    limit: int | None,
) -> list[str]:
    """Write the events of a file up to the limit. Return what the limit and the selected time left out.

    Args:
        texts: Some events at a time.
        counts: Counts the written events.
        rows: Returns the rows that have got an event so far.
    """
    left_out = list[str]()
    latest = 0
    for text in texts:
        if limit is not None and out.flush() + latest > limit:
            left_out.append(f"{name}: what follows its first {counts.written} events, for its size")
            break
        if text:
            for row in rows():
                show(row, tracks, out.objects)
            before = out.written
            out.events(text)
            latest = 0 if limit is None else out.flush() - before
    out.objects(tracks.take() + tracks.take_unnamed())
    if counts.outside:
        left_out.append(f"{name}: {counts.outside} events outside the selected time")
    return left_out


def show(row: Row, tracks: Tracks, write: Write) -> None:
    """Write the metadata of the row before its first event."""
    if not row.shown:
        row.shown = True
        write(list(row_metadata(row)))
    write(tracks.take())


def noted(name: str, notes: Notes) -> list[FileProblem]:
    return [FileProblem(file=name, what=what, events=events) for what, events in notes.counts.items()]
