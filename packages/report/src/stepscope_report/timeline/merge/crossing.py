"""Slices of one thread that overlap without nesting: found before a file is written.

Perfetto drops the later one of two such slices. With `with_stack`, these are all ranges of the user: a range
begins inside the call of its `__enter__`, and ends behind it. Each goes to the first line of its thread on
which it nests. That takes the times of all slices in the order of their starts, which files do not have:
24 bytes are kept of each.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from heapq import merge
from operator import or_
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from stepscope_report.timeline.activity.content_reader import skipped_phases
from stepscope_report.timeline.activity.intervals import CHUNK
from stepscope_report.timeline.readers.chrome import ChromeTrace

Crossing: TypeAlias = Mapping[int, bytes | bytearray]
"""{number of a batch of the file: line of each of its events, up to the last one that is not on line 0}."""
_MOST_LINES = 16
"""Largest number of lines of a thread. What crosses all of them stays on the first."""
_BATCH = 1 << 20
"""Factor between the number of a batch and that of an event in it, in one number."""


class _Slice(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


_union: Any = reduce(or_, skipped_phases, _Slice)
_decode = msgspec.json.Decoder(list[_union], strict=False).decode
_decode_one = msgspec.json.Decoder(_union, strict=False).decode
_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Thread:
    """The slices of one thread. They are returned by their starts, in whatever order they are added."""

    def __init__(self) -> None:
        self._latest: list[tuple[int, int, int]] = []
        self._chunks: list[tuple[array[int], array[int], array[int]]] = []

    def add(self, start_ns: int, dur_ns: int, number: int) -> None:
        self._latest.append((start_ns, -dur_ns, number))
        if len(self._latest) >= CHUNK:
            self._pack()

    def _pack(self) -> None:
        self._latest.sort()
        starts, durs, numbers = zip(*self._latest, strict=True)
        self._chunks.append((array("q", starts), array("q", durs), array("q", numbers)))
        self._latest.clear()

    def crossing(self) -> Iterator[tuple[int, int]]:
        """Yield (number of a slice, its line) for all slices that are not on the first line."""
        if self._latest:
            self._pack()
        lines: list[list[int]] = [[]]
        for start_ns, minus_dur_ns, number in merge(*(zip(*chunk, strict=True) for chunk in self._chunks)):
            end_ns = start_ns - minus_dur_ns
            line = _line_for(lines, start_ns, end_ns)
            if line:
                yield number, line


def _line_for(lines: list[list[int]], start_ns: int, end_ns: int) -> int:
    """Return the first line on which a slice nests, and add the slice there."""
    for line, ends in enumerate(lines):
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if not ends or end_ns <= ends[-1]:
            ends.append(end_ns)
            return line
    if len(lines) == _MOST_LINES:
        return 0
    lines.append([end_ns])
    return len(lines) - 1


def find_crossing(path: Path) -> Crossing:
    """Return the slices of a file that a viewer would drop. Batches are those of `ChromeTrace.texts`."""
    threads: dict[tuple[int | str, int | str], _Thread] = defaultdict(_Thread)
    for batch, slices in enumerate(ChromeTrace(path).texts(_slices)):
        for number, event in enumerate(slices, batch * _BATCH):
            if type(event) is _Slice and abs(event.ts) < 4e15 and 0 <= event.dur < 4e15:
                whole_us = int(event.ts)  # a double of us since 1970 has no room for the ns
                start_ns = whole_us * 1000 + round((event.ts - whole_us) * 1000)
                threads[event.pid, event.tid].add(start_ns, round(event.dur * 1000), number)
    found: dict[int, bytearray] = defaultdict(bytearray)
    while threads:
        _, thread = threads.popitem()
        for number, line in thread.crossing():
            lines, at = found[number // _BATCH], number % _BATCH
            lines.extend(bytes(max(0, at + 1 - len(lines))))
            lines[at] = line
    return found


def _slices(text: bytes) -> list[object]:
    try:
        events: list[object] = _decode(text)
    except msgspec.ValidationError:
        events = []
        for element in _raw(text):
            try:
                events.append(_decode_one(element))
            except msgspec.ValidationError:
                events.append(None)
    return events
