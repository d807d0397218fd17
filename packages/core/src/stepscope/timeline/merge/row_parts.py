"""Rows of a timeline as parts that other processes write."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from stepscope.files.storage.temporary import temporary
from stepscope.timeline.execution.near import NearFiles, size_of
from stepscope.timeline.execution.parts import Lost, results
from stepscope.timeline.merge.merged import MergedFile
from stepscope.timeline.merge.row_writer import Common, RowOutcome, RowTraces, write_row
from stepscope.timeline.merge.time_mapping import Cut
from stepscope.timeline.merge.tracks import RowTracks, Tracks
from stepscope.timeline.merge.write import TimelineFile, Written, piece_file
from stepscope.timeline.model import FileProblem
from stepscope.timeline.readers.blocks import keep_memory
from stepscope.timeline.step.rows import Axis


class RowPart(msgspec.Struct, frozen=True, kw_only=True):
    """A row's traces, and all that its process needs to write them."""

    traces: RowTraces
    axis: Axis
    cut: Cut
    files: int
    tracks: RowTracks
    to: bytes | None
    """Path of the piece, the system's bytes. None: it is returned."""


class WrittenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A piece with a row's events, and what writing it changed and found."""

    pid: int
    """Number of the row."""
    text: Written
    shown: bool
    shift_ns: int | None
    tracks: RowTracks
    files: list[MergedFile]
    problems: list[FileProblem]
    left_out: list[str]
    piece: bytes | None = None


def write_part(part: RowPart) -> WrittenRow:
    """Write the traces of a row into a file of their own."""
    keep_memory()
    if part.to is None:
        with TemporaryDirectory(prefix="stepscope-") as folder:
            path = Path(folder, "row")
            written = write_part(msgspec.structs.replace(part, to=os.fsencode(path)))
            return msgspec.structs.replace(written, piece=path.read_bytes())
    row = part.traces.row
    common = Common(part.axis, part.cut, part.files, Tracks.of(row, part.tracks))
    with piece_file(Path(os.fsdecode(part.to))) as out:
        outcome = write_row(part.traces, common, out)
        text = out.end()
    return WrittenRow(
        pid=row.pid,
        text=text,
        shown=row.shown,
        shift_ns=row.shift_ns,
        tracks=common.tracks.known(row),
        files=outcome.files,
        problems=outcome.problems,
        left_out=outcome.left_out,
    )


def write_rows(
    rows: list[RowTraces],
    common: Common,
    out: TimelineFile,
    executor: Executor,
    folder: Path,
    on_read: Callable[[int], None] | None = None,
) -> Generator[RowOutcome, None, None]:
    """Write rows in processes, append them in their order, and yield what came of each.

    A row whose worker dies twice is left out and named.

    Args:
        folder: Folder of the temporary files. None remains, whatever happens.
    """
    files = [[Path(os.fsdecode(trace.path)) for trace in traces.traces] for traces in rows]
    return_pieces = isinstance(executor, NearFiles)
    with _names(folder, len(rows)) as paths:
        parts = [
            RowPart(
                traces=traces,
                axis=common.axis,
                cut=common.cut,
                files=common.files,
                tracks=common.tracks.known(traces.row),
                to=None if return_pieces else os.fsencode(path),
            )
            for traces, path in zip(rows, paths, strict=True)
        ]
        places = {traces.row.pid: path for traces, path in zip(rows, paths, strict=True)}
        then = partial(_with_piece, places) if return_pieces else None
        with closing(results(executor, write_part, parts, files, then)) as written:
            for traces, path, result in zip(rows, paths, written, strict=True):
                if isinstance(result, Lost):
                    yield _lost(traces, result)
                else:
                    out.append(path, result.text)
                    yield _adopted(traces, common, result)
                path.unlink(missing_ok=True)
                if on_read is not None:
                    on_read(sum(size_of(trace.path, executor) for trace in traces.traces))


def _with_piece(places: Mapping[int, Path], row: WrittenRow) -> WrittenRow:
    """Write the piece that another machine returned into its file."""
    places[row.pid].write_bytes(row.piece or b"")
    return msgspec.structs.replace(row, piece=None)


def _adopted(traces: RowTraces, common: Common, part: WrittenRow) -> RowOutcome:
    row, outcome = traces.row, RowOutcome()
    row.shown, row.shift_ns = part.shown, part.shift_ns
    common.tracks.adopt(row, part.tracks)
    outcome.files += part.files
    outcome.problems += part.problems
    outcome.left_out += part.left_out
    return outcome


def _lost(traces: RowTraces, lost: Lost) -> RowOutcome:
    outcome = RowOutcome()
    outcome.problems += [
        FileProblem(file=trace.name, what=f"left out: twice, {lost.why}") for trace in traces.traces
    ]
    return outcome


@contextmanager
def _names(folder: Path, count: int) -> Iterator[list[Path]]:
    """Yield names of temporary files, and remove what is there afterwards."""
    paths = [temporary(folder / "row") for _ in range(count)]
    try:
        yield paths
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink()
