"""Reader of one span file, complete or not: killed processes and full disks leave partial files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.files.spans import End, Header, Line, Open, Span
from stepscope.files.storage.reading import lines_of, open_file

_decode = msgspec.json.Decoder(Line).decode
_FARTHEST_NS = 1 << 62
"""Times beyond 146 years (of uptime, or since 1970) are garbage."""


class SpanFile(msgspec.Struct):
    """Usable content of one file."""

    path: Path
    header: Header | None = None
    end: End | None = None
    spans: dict[int, Open] = {}
    """Records by id: a `Span`, or an `Open` without an end."""
    latest_ns: int | None = None
    """The latest monotonic time in the file."""
    problems: dict[str, int | None] = {}
    """Unusable parts, with the number of lines (None: the file)."""


def read_spans(path: Path, on_read: Callable[[int], None] | None = None) -> SpanFile:
    """Return the records of a span file. Damage or absence raises no exception.

    Args:
        path: A `.jsonl` file.
        on_read: Called with the number of bytes of each read.
    """
    file = SpanFile(path)
    try:
        with open_file(path) as stream:
            for line, whole in lines_of(stream):
                if on_read is not None:
                    on_read(len(line))
                _take(file, line, whole)
    except OSError as error:
        _note(file, f"cannot be read: {error.strerror or error}", lines=None)
    _check(file)
    return file


def _take(file: SpanFile, line: bytes, whole: bool) -> None:
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _note(
            file,
            "lines that are no record"
            if whole
            else "last line cut off: its writer was killed, or the disk full",
        )
        return
    if isinstance(record, Open):
        _take_span(file, record)
    elif not (_possible(record.anchor.mono_ns) and _possible(record.anchor.wall_ns)):
        _note(file, "clock readings that are impossible")
    elif isinstance(record, End):
        file.end = record
        _seen(file, record.anchor.mono_ns)
    elif file.header is None:
        file.header = record
    else:
        _note(file, "further headers")


def _take_span(file: SpanFile, record: Open | Span) -> None:
    dur_ns = record.dur_ns if isinstance(record, Span) else 0
    if not (_possible(dur_ns) and _possible(record.start_ns)):
        _note(file, "spans with impossible times")
        return
    known = file.spans.get(record.span)
    if isinstance(known, Span):
        if isinstance(record, Span):
            _note(file, "spans whose number another one has")
        return
    file.spans[record.span] = record
    _seen(file, record.start_ns + dur_ns)


def _possible(time_ns: int) -> bool:
    return 0 <= time_ns < _FARTHEST_NS


def _seen(file: SpanFile, mono_ns: int) -> None:
    if file.latest_ns is None or mono_ns > file.latest_ns:
        file.latest_ns = mono_ns


def _note(file: SpanFile, what: str, lines: int | None = 1) -> None:
    before = file.problems.get(what)
    file.problems[what] = lines if before is None or lines is None else before + lines


def _check(file: SpanFile) -> None:
    """Note the problems of the whole file."""
    if file.header is None:
        something = file.spans or file.end or file.problems
        _note(file, "no header" if something else "empty", lines=None)
    finished = sum(isinstance(span, Span) for span in file.spans.values())
    if file.end is not None and finished < file.end.spans:
        _note(file, f"spans lost: its end counts {file.end.spans}", lines=file.end.spans - finished)
