"""Reader of one counter file, complete or not, as `readers.spans` is of spans."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path

import msgspec

from stepscope.files.counters import End, Header, Line, Sample, Series
from stepscope.files.storage.reading import lines_of, open_file

_decode = msgspec.json.Decoder(Line).decode
_FARTHEST_NS = 1 << 62


class CounterFile(msgspec.Struct):
    """Usable content of one file."""

    path: Path
    header: Header | None = None
    end: End | None = None
    series: dict[int, Series] = {}
    """By number."""
    samples: list[Sample] = []
    """In the order of their times."""
    problems: dict[str, int | None] = {}
    """Unusable parts, with the number of lines (None: the file)."""


def read_counters(path: Path, on_read: Callable[[int], None] | None = None) -> CounterFile:
    """Return the records of a counter file. Damage or absence raises no exception.

    Args:
        path: A `.jsonl` file.
        on_read: Called with the number of bytes of each read.
    """
    file = CounterFile(path)
    try:
        with open_file(path) as stream:
            for line, whole in lines_of(stream):
                if on_read is not None:
                    on_read(len(line))
                _take(file, line, whole)
    except OSError as error:
        _note(file, f"cannot be read: {error.strerror or error}", lines=None)
    file.samples.sort(key=lambda sample: sample.at_ns)
    if file.header is None:
        _note(file, "no header" if file.samples or file.problems else "empty", lines=None)
    if file.end is not None and len(file.samples) < file.end.samples:
        lost = file.end.samples - len(file.samples)
        _note(file, f"samples lost: its end counts {file.end.samples}", lines=lost)
    return file


def _take(file: CounterFile, line: bytes, whole: bool) -> None:
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        cut = "last line cut off: its writer was killed, or the disk full"
        _note(file, "lines that are no record" if whole else cut)
        return
    match record:
        case Sample() if 0 <= record.at_ns < _FARTHEST_NS and all(map(isfinite, record.values.values())):
            file.samples.append(record)
        case Series():
            file.series.setdefault(record.series, record)
        case Header() if file.header is None:
            file.header = record
        case End():
            file.end = record
        case _:
            _note(file, "samples that are impossible" if isinstance(record, Sample) else "further headers")


def _note(file: CounterFile, what: str, lines: int | None = 1) -> None:
    before = file.problems.get(what)
    file.problems[what] = lines if before is None or lines is None else before + lines
