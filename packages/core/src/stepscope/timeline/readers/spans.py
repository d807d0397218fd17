"""Reader of one span file, complete or not: killed processes and full disks leave partial files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.files.spans import End, Header, Line, Open, Span
from stepscope.timeline.readers.record_file import RecordFile

_decode = msgspec.json.Decoder(Line).decode
_FARTHEST_NS = 1 << 62
"""Times beyond 146 years (of uptime, or since 1970) are garbage."""


class SpanFile(RecordFile):
    """Usable content of one file."""

    header: Header | None = None
    end: End | None = None
    spans: dict[int, Open] = msgspec.field(default_factory=dict)
    """Records by id: a `Span`, or an `Open` without an end."""
    latest_ns: int | None = None
    """The latest monotonic time in the file."""


def read_spans(path: Path, on_read: Callable[[int], None] | None = None) -> SpanFile:
    """Return the records of a span file. Damage or absence raises no exception.

    Args:
        path: A `.jsonl` file.
        on_read: Called with the number of bytes of each read.
    """
    file = SpanFile(path)
    for record in file.records(_decode, on_read):
        _take(file, record)
    _check(file)
    return file


def _take(file: SpanFile, record: Line) -> None:
    if isinstance(record, Open):
        _take_span(file, record)
    elif not (_possible(record.anchor.mono_ns) and _possible(record.anchor.wall_ns)):
        file.note("clock readings that are impossible")
    elif isinstance(record, End):
        file.end = record
        _seen(file, record.anchor.mono_ns)
    elif file.header is None:
        file.header = record
    else:
        file.note("further headers")


def _take_span(file: SpanFile, record: Open | Span) -> None:
    dur_ns = record.dur_ns if isinstance(record, Span) else 0
    if not (_possible(dur_ns) and _possible(record.start_ns)):
        file.note("spans with impossible times")
        return
    known = file.spans.get(record.span)
    if isinstance(known, Span):
        if isinstance(record, Span):
            file.note("spans whose number another one has")
        return
    file.spans[record.span] = record
    _seen(file, record.start_ns + dur_ns)


def _possible(time_ns: int) -> bool:
    return 0 <= time_ns < _FARTHEST_NS


def _seen(file: SpanFile, mono_ns: int) -> None:
    if file.latest_ns is None or mono_ns > file.latest_ns:
        file.latest_ns = mono_ns


def _check(file: SpanFile) -> None:
    """Note the problems of the whole file."""
    if file.header is None:
        something = file.spans or file.end or file.problems
        file.note("no header" if something else "empty", lines=None)
    finished = sum(isinstance(span, Span) for span in file.spans.values())
    if file.end is not None and finished < file.end.spans:
        file.note(f"spans lost: its end counts {file.end.spans}", lines=file.end.spans - finished)
