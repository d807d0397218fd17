"""Rows of a timeline as parts that other processes write."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing, contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path

import msgspec

from stepscope.files.storage.atomic import private
from stepscope.files.storage.temporary import temporary
from stepscope.timeline.execution.near import size_of
from stepscope.timeline.execution.parts import Lost, results
from stepscope.timeline.merge.row_writer import Common, RowOutcome, RowTraces, unlimited, write_row
from stepscope.timeline.merge.time_mapping import Cut
from stepscope.timeline.merge.tracks import RowTracks, Tracks
from stepscope.timeline.merge.write import (
    EventWriter,
    Sink,
    TimelineFile,
    Written,
    full_disk_names,
    piece_file,
)
from stepscope.timeline.model import FileProblem
from stepscope.timeline.readers.blocks import keep_memory
from stepscope.timeline.step.rows import Axis


class RowPart(msgspec.Struct, frozen=True, kw_only=True):
    """A row's traces, and all that its process needs to write them."""

    traces: RowTraces
    axis: Axis
    cut: Cut
    files: int
    pids: list[int]
    """Of all rows."""
    tracks: RowTracks
    to: Path | None
    """Path of the piece. None: it is returned."""
    token: bytes
    """Content of that file, by which a process knows that it sees the merging one's disk."""


class WrittenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A piece with a row's events, and what writing it changed and found."""

    pid: int
    """Number of the row."""
    text: Written
    shown: bool
    shift_ns: int | None
    tracks: RowTracks
    outcome: RowOutcome
    piece: bytes | None = None
    """None: it is in its file."""


def write_part(part: RowPart) -> WrittenRow:
    """Write the traces of a row into the file of their piece, or return it if that is not here."""
    keep_memory()
    if part.to is not None:
        with piece_file(part.to, part.token) as out:
            if out is not None:
                return _written(part, out)
    piece = BytesIO()
    written = _written(part, EventWriter(Sink(piece)))
    return msgspec.structs.replace(written, piece=piece.getvalue())


def _written(part: RowPart, out: EventWriter) -> WrittenRow:
    row = part.traces.row
    common = Common(part.axis, part.cut, part.files, Tracks(part.pids))
    common.tracks.adopt(row, part.tracks)
    outcome = write_row(part.traces, common, out)
    text = out.end()
    return WrittenRow(
        pid=row.pid,
        text=text,
        shown=row.shown,
        shift_ns=row.shift_ns,
        tracks=common.tracks.known(row),
        outcome=outcome,
    )


def write_rows(
    rows: list[RowTraces],
    common: Common,
    out: TimelineFile,
    executor: Executor | None,
    folder: Path,
    on_read: Callable[[int], None] | None = None,
    limit_of: Callable[[EventWriter], int | None] = unlimited,
) -> Generator[RowOutcome, None, None]:
    """Write rows, append them in their order, and yield what came of each.

    A row whose worker dies twice is left out and named.

    Args:
        executor: Processes that write them. None: this one does.
        folder: Folder of the temporary files. None remains, whatever happens.
        limit_of: As in `write_row`, for this process.
    """
    if executor is None:
        for traces in rows:
            with out.piece() as piece:
                yield write_row(traces, common, piece, limit_of=limit_of, on_read=on_read)
        return
    files = [[trace.path for trace in traces.traces] for traces in rows]
    token = os.urandom(16)
    with _pieces(folder, len(rows), token) as paths:
        parts = [
            RowPart(
                traces=traces,
                axis=common.axis,
                cut=common.cut,
                files=common.files,
                pids=common.tracks.pids,
                tracks=common.tracks.known(traces.row),
                to=path,
                token=token,
            )
            for traces, path in zip(rows, paths, strict=True)
        ]
        places = {traces.row.pid: path for traces, path in zip(rows, paths, strict=True)}
        keep = partial(_with_piece, places)
        elsewhere = partial(msgspec.structs.replace, to=None)  # where the file of the piece is not
        with closing(results(executor, write_part, parts, files, keep, elsewhere)) as written:
            for traces, path, result in zip(rows, paths, written, strict=True):
                if isinstance(result, Lost):
                    what = f"left out: twice, {result.why}"
                    yield RowOutcome(problems=[FileProblem(file=t.name, what=what) for t in traces.traces])
                else:
                    out.append(path, keep(result).text)
                    traces.row.shown, traces.row.shift_ns = result.shown, result.shift_ns
                    common.tracks.adopt(traces.row, result.tracks)
                    yield result.outcome
                path.unlink(missing_ok=True)
                if on_read is not None:
                    on_read(sum(size_of(trace.path, executor) for trace in traces.traces))


def _with_piece(places: Mapping[int, Path], row: WrittenRow) -> WrittenRow:
    """Write a piece that was returned into its file, a new one: a process may still write into the old."""
    if row.piece is None:
        return row
    path = places[row.pid]
    path.unlink(missing_ok=True)
    _create(path, row.piece)
    return msgspec.structs.replace(row, piece=None)


def _create(path: Path, content: bytes) -> None:
    with full_disk_names(path), open(path, "xb", opener=private) as file:
        file.write(content)


@contextmanager
def _pieces(folder: Path, count: int, token: bytes) -> Iterator[list[Path]]:
    """Yield temporary files that hold `token`, and remove them afterwards."""
    paths = [temporary(folder / "row") for _ in range(count)]
    try:
        for path in paths:
            _create(path, token)
        yield paths
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink()
