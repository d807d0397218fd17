"""Traces in a timeline that `stepscope merge` wrote, by process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import Complete, Event, Reading, Thread
from stepscope_report.timeline.merge.records import MergedRow
from stepscope_report.timeline.readers.blocks import Notes
from stepscope_report.timeline.readers.chrome import ChromeTrace, TraceFields

_MARK = b'"displayTimeUnit":"ms","baseTimeNanoseconds":'


class _Merged(msgspec.Struct, frozen=True):
    rows: tuple[MergedRow, ...]


def rows_of(path: Path, head: bytes) -> tuple[MergedRow, ...] | None:
    """Return the rows of a timeline of stepscope, or None for any other file.

    Args:
        head: The first bytes of the file.
    """
    if _MARK not in head:
        return None
    field = ChromeTrace(path).field("stepscope")
    try:
        return None if field is None else msgspec.json.decode(field, type=_Merged).rows
    except msgspec.DecodeError:
        return None


def read_timeline(path: Path, rows: Sequence[MergedRow]) -> list[tuple[ProcessInfo, TraceContent]]:
    """Return what the timeline holds of each process. Process groups are not told apart."""
    notes, readings, fields = _read(path, {})
    sort = {pid: frozenset(reading.unordered) for pid, reading in readings.items()}
    if any(sort.values()):
        notes, readings, fields = _read(path, sort)
    held = []
    for row in rows:
        if row.pid in readings:
            base_ns = None if row.alignment == "unaligned" else fields.base_ns
            of_row = msgspec.structs.replace(fields, base_ns=base_ns, distributed=None, host=row.host)
            held.append((_info(row), readings[row.pid].finish(of_row)))
    if held:
        held[0][1].problems.update(notes.counts)
    return held


def _read(path: Path, sort: Mapping[int, frozenset[Thread]]) -> tuple[Notes, dict[int, Reading], TraceFields]:
    notes, readings = Notes(), dict[int, Reading]()

    def take(events: list[Event]) -> None:
        of_row: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            if isinstance(event, Complete) and isinstance(event.pid, int):
                of_row[event.pid].append(event)
        for pid, own in of_row.items():
            if pid not in readings:
                readings[pid] = Reading(Notes(), sort.get(pid, frozenset()))
            readings[pid].take(own)

    trace = ChromeTrace(path, notes)
    return notes, readings, trace.read(Reading(notes, frozenset()).parse, take)


def _info(row: MergedRow) -> ProcessInfo:
    return ProcessInfo(
        role=row.role,
        rank=row.rank,
        world_size=None,
        host=row.host,
        pid=row.native_pid or row.pid,
        replica=row.replica,
    )
