"""Content of a recording that a reader gives as events, by process: the same as that of a torch trace."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing

import msgspec

from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import DEVICE, Complete, Reading, Thread
from stepscope_report.timeline.readers.blocks import Notes
from stepscope_report.timeline.readers.chrome import Distributed, TraceFields
from stepscope_report.timeline.readers.contract import FoundFile, Origin, Reader, Slice, Track
from stepscope_report.timeline.readers.installed import failure_noted, undeclared

_BATCH = 2000


class ProcessContent(msgspec.Struct, kw_only=True):
    """Activity of one process in a recording."""

    pid: int | None
    """One of `Origin.processes`, or None for the recorded process."""
    content: TraceContent
    """`base_ns` is the time of the file at which its times begin, or None if its clock is unknown."""


def read_recording(reader: Reader, file: FoundFile) -> list[ProcessContent]:
    """Read a recording. One that cannot be read raises no exception; see `TraceContent.problems`."""
    contents = _Contents(reader, file, {})
    unordered = {pid: frozenset(reading.unordered) for pid, reading in contents.readings.items()}
    if any(unordered.values()):  # threads whose operators do not come by their starts are sorted
        contents = _Contents(reader, file, unordered)
    return contents.finish()


class _Contents:
    """One pass over a file."""

    def __init__(self, reader: Reader, file: FoundFile, sort: dict[int | None, frozenset[Thread]]) -> None:
        self._notes = Notes()
        self._sort = sort
        self._origin = Origin(clock="unknown")
        self._base_ns: int | None = None
        self._tracks: dict[int, Track] = {}
        self._pending: dict[int | None, list[Complete]] = defaultdict(list)
        self.readings: dict[int | None, Reading] = {}
        with failure_noted(reader, self._notes), closing(reader.open(file, self._notes)) as recording:
            self._origin = recording.origin
            for event in recording.events():
                if isinstance(event, Track):
                    if event.pid not in (None, *self._origin.processes):
                        raise undeclared(event)
                    self._tracks[event.track] = event
                elif isinstance(event, Slice):
                    self._take(event, self._tracks[event.track])

    def _take(self, event: Slice, track: Track) -> None:
        category = event.category or ""
        if category in DEVICE and track.device is None:
            return  # the host's view of work that a device's own track has too
        if self._base_ns is None:
            self._base_ns = event.start_ns  # floats of us since 1970 would lose their ns
        pending = self._pending[track.pid]
        pending.append(
            Complete(
                name=event.name,
                cat=category,
                pid=track.device if category in DEVICE and track.device is not None else 0,
                tid=track.track,
                ts=(event.start_ns - self._base_ns) / 1000,
                dur=event.dur_ns / 1000,
            )
        )
        if len(pending) >= _BATCH:
            self._pass_on(track.pid)

    def _pass_on(self, pid: int | None) -> None:
        events = self._pending.pop(pid)
        reading = self.readings.get(pid)
        if reading is None:
            reading = self.readings[pid] = Reading(Notes(), self._sort.get(pid, frozenset()))
        reading.take(events)
        reading.seen(min(event.ts for event in events), max(event.ts + event.dur for event in events))

    def finish(self) -> list[ProcessContent]:
        for pid in list(self._pending):
            self._pass_on(pid)
        origin = self._origin
        fields = TraceFields(
            base_ns=None if origin.clock == "unknown" else self._base_ns,
            distributed=None
            if origin.rank is None
            else Distributed(rank=origin.rank, world_size=origin.world_size),
            host=origin.host,
        )
        readings = self.readings or {None: Reading(Notes(), frozenset())}
        contents = [
            ProcessContent(pid=pid, content=reading.finish(fields)) for pid, reading in readings.items()
        ]
        contents[0].content.problems.update(self._notes.counts)
        return contents
