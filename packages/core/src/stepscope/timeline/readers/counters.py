"""Reader of one counter file, complete or not, as `readers.spans` is of spans."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path

import msgspec

from stepscope.files.counters import End, Header, Line, Sample, Series
from stepscope.timeline.readers.record_file import RecordFile

_decode = msgspec.json.Decoder(Line).decode
_FARTHEST_NS = 1 << 62


class CounterFile(RecordFile):
    """Usable content of one file."""

    header: Header | None = None
    end: End | None = None
    series: dict[int, Series] = msgspec.field(default_factory=dict)
    """By number."""
    samples: list[Sample] = msgspec.field(default_factory=list)
    """In the order of their times."""


def read_counters(path: Path, on_read: Callable[[int], None] | None = None) -> CounterFile:
    """Return the records of a counter file. Damage or absence raises no exception.

    Args:
        path: A `.jsonl` file.
        on_read: Called with the number of bytes of each read.
    """
    file = CounterFile(path)
    for record in file.records(_decode, on_read):
        _take(file, record)
    file.samples.sort(key=lambda sample: sample.at_ns)
    if file.header is None:
        file.note("no header" if file.samples or file.problems else "empty", lines=None)
    if file.end is not None and len(file.samples) < file.end.samples:
        lost = file.end.samples - len(file.samples)
        file.note(f"samples lost: its end counts {file.end.samples}", lines=lost)
    return file


def _take(file: CounterFile, record: Line) -> None:
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
            file.note("samples that are impossible" if isinstance(record, Sample) else "further headers")
