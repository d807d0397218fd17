"""The Chrome traces of one row, written: what they become depends on no other row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from stepscope.timeline.merge.ids import FlowIds
from stepscope.timeline.merge.merged import MergedFile
from stepscope.timeline.merge.rewrite import Rewriter, Text
from stepscope.timeline.merge.template import Cut
from stepscope.timeline.merge.time_mapping import Place
from stepscope.timeline.merge.tracks import Tracks, row_metadata
from stepscope.timeline.model import FileProblem
from stepscope.timeline.readers.blocks import Notes
from stepscope.timeline.readers.chrome import ChromeTrace
from stepscope.timeline.step.rows import Axis, Row


class Output(Protocol):
    """Where events go."""

    @property
    def written(self) -> int: ...
    def events(self, text: bytes | memoryview) -> None: ...
    def objects(self, events: list[dict[str, object]]) -> None: ...
    def settle(self) -> int: ...


class RowTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    path: bytes
    """As the system has it: it may be no UTF-8."""
    name: str
    """Relative to the step's folder."""
    number: int
    """Among all traces of the step: its ids' prefix. That of the first one in a row is the row's place."""
    base_ns: int | None


class RowTraces(msgspec.Struct, frozen=True):
    row: Row
    traces: tuple[RowTrace, ...]


class Common(NamedTuple):
    """What all rows of a merge have in common."""

    axis: Axis
    cut: Cut
    files: int
    """The highest number of a trace."""
    tracks: Tracks


class Told(msgspec.Struct, kw_only=True):
    """What is to be said of a row's traces when they are written."""

    files: list[MergedFile] = []
    problems: list[FileProblem] = []
    left_out: list[str] = []
    shown: bool = False
    """As `Row.shown` and `Row.shift_ns` then are."""
    shift_ns: int | None = 0


def write_row(
    of: RowTraces,
    common: Common,
    out: Output,
    *,
    limit_of: Callable[[], int | None] = lambda: None,
    on_read: Callable[[int], None] | None = None,
) -> Told:
    """Writes the traces of a row, in their order.

    Args:
        limit_of: Asked before each trace: the size of the file at which it ends.
        on_read: Called with a number of bytes each time that many more of the files were read.
    """
    row, told = of.row, Told()
    for trace in of.traces:
        file = ChromeTrace(Path(os.fsdecode(trace.path)))
        place = Place(row, trace.base_ns, common.axis)
        ids = FlowIds(trace.number, common.files)
        rewriter = Rewriter(row, place, ids, common.tracks, common.cut, file.notes)
        texts = file.texts(rewriter.rewrite, on_read)
        drawn = TraceTexts(trace.name, texts, rewriter, lambda: [row])
        told.left_out += drawn.write(out, common.tracks, limit_of())
        told.files.append(MergedFile(file=trace.name, row=row.pid, events=rewriter.written))
        told.problems += noted(trace.name, file.notes)
    told.shown, told.shift_ns = row.shown, row.shift_ns
    return told


class Counts(Protocol):
    @property
    def written(self) -> int: ...
    @property
    def outside(self) -> int: ...


class TraceTexts(NamedTuple):
    """A file's events, some at a time."""

    name: str
    texts: Iterable[Text]
    counts: Counts
    rows: Callable[[], list[Row]]
    """Those that they are in so far."""

    def write(self, out: Output, tracks: Tracks, limit: int | None) -> list[str]:
        """As far as the limit goes. Returns what that left out, or the time that was asked for."""
        left_out = list[str]()
        latest = 0
        for text in self.texts:
            if limit is not None and out.settle() + latest > limit:
                left_out.append(
                    f"{self.name}: what follows its first {self.counts.written} events, for its size"
                )
                break
            if text:
                for row in self.rows():
                    show(row, tracks, out)
                before = out.written
                out.events(text)
                latest = 0 if limit is None else out.settle() - before
        out.objects(tracks.take() + tracks.take_unnamed())
        if self.counts.outside:
            left_out.append(f"{self.name}: {self.counts.outside} events outside the time that was asked for")
        return left_out


def show(row: Row, tracks: Tracks, out: Output) -> None:
    """Writes what is to be known of the row before its first event."""
    if not row.shown:
        row.shown = True
        out.objects(list(row_metadata(row)))
    out.objects(tracks.take())


def noted(name: str, notes: Notes) -> list[FileProblem]:
    return [FileProblem(file=name, what=what, events=events) for what, events in notes.counts.items()]
