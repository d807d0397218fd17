"""Events of a `Reader` in a merged timeline: in its processes' rows, on the owner's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Literal

import msgspec

from stepscope_report.timeline.clocks import NOT_NEAR
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, JsonEvent, Place, Tracks, microseconds
from stepscope_report.timeline.readers.contract import (
    Counter,
    Flow,
    Instant,
    Slice,
    Track,
    failure_noted,
    undeclared,
)
from stepscope_report.timeline.rows import Axis, Recorded, Row

NOT_WRITTEN = "events that JSON cannot hold"
_BATCH = 2000
"""Number of events that are passed on together."""
_PHASES: Mapping[Literal["start", "step", "end"], str] = {"start": "s", "step": "t", "end": "f"}
_encode = msgspec.json.Encoder().encode


class Drawing:
    """The events of one recording, as JSON."""

    def __init__(
        self,
        recorded: Recorded,
        shown: Mapping[int | None, Row],
        ids: FlowIds,
        tracks: Tracks,
        axis: Axis,
        cut: Cut,
    ) -> None:
        """
        Args:
            shown: The selected rows of `recorded.rows`.
        """
        self._recorded = recorded
        self._rows = shown
        self._places = {pid: Place(row, 0, axis) for pid, row in shown.items()}
        self._ids = ids
        self._tracks = tracks
        self._cut = cut
        self._lines: dict[int, _Line | None] = {}
        self._pending: list[bytes] = []
        self.notes = recorded.notes
        self.events: dict[int, int] = {}
        """{pid of a row: number of its drawn events}."""
        self.outside = 0
        """Number of events left out because they are not between `from` and `to`."""

    @property
    def written(self) -> int:
        return sum(self.events.values())

    @property
    def touched(self) -> list[Row]:
        """Rows with at least one drawn event."""
        return [row for row in self._rows.values() if row.pid in self.events]

    def texts(self) -> Iterator[bytes]:
        """Yield batches of events as JSON without brackets. If the reader raises, the batches end, and the
        exception is noted.
        """
        recorded = self._recorded
        with (
            failure_noted(recorded.reader, self.notes),
            closing(recorded.reader.open(recorded.file, self.notes)) as recording,
        ):
            for event in recording.events():
                if isinstance(event, Track):
                    self._declare(event)
                elif (line := self._lines[event.track]) is not None:
                    self._draw(event, line)
                if len(self._pending) >= _BATCH:
                    yield self._taken()
        if self._pending:
            yield self._taken()

    def _taken(self) -> bytes:
        taken, self._pending = self._pending, []
        return b",\n".join(taken)

    def _declare(self, track: Track) -> None:
        known = self._lines.get(track.track)
        if known is not None:
            known.rename(track.name)
        elif track.pid not in self._recorded.rows:
            raise undeclared(track)
        elif track.pid not in self._rows:
            self._lines[track.track] = None  # its role or rank is not selected
        else:
            row, owner = self._rows[track.pid], self._recorded.reader.name
            self._lines[track.track] = _Line(track, row, self._places[track.pid], self._tracks, owner)

    def _draw(self, event: Slice | Instant | Counter | Flow, line: _Line) -> None:
        start_ns = event.start_ns if isinstance(event, Slice) else event.at_ns
        dur_ns = event.dur_ns if isinstance(event, Slice) else 0
        if type(start_ns) is not int or type(dur_ns) is not int or dur_ns < 0:
            raise ValueError(f"times are ints in ns, durations not negative; {event!r} is not so")
        wall = self._recorded.wall
        first = line.row.shift_ns is None
        position = line.place.at(start_ns if wall is None else wall(start_ns))
        if first:  # the shift applies to all rows of the file, which has one clock
            for row in self._recorded.rows.values():
                row.shift_ns = line.row.shift_ns if row.shift_ns is None else row.shift_ns
        if position is None:
            self.notes.events(NOT_NEAR)
            return
        if not self._cut.holds(position, position + dur_ns):
            self.outside += 1
            return
        made = self._json(event, line, position, dur_ns)
        try:
            self._pending.append(_encode(made))
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            self.notes.events(NOT_WRITTEN)
        else:
            self.events[line.row.pid] = self.events.get(line.row.pid, 0) + 1

    def _json(
        self, event: Slice | Instant | Counter | Flow, line: _Line, position: int, dur_ns: int
    ) -> JsonEvent:
        made: JsonEvent = {"name": event.name, "pid": line.row.pid, "ts": microseconds(position)}
        if isinstance(event, Counter):
            pid = self._tracks.counters(line.row, self._recorded.reader.name)
            return {"ph": "C", **made, "pid": pid, "args": dict(event.values)}
        if event.category is not None:
            made["cat"] = event.category
        if isinstance(event, Flow):
            made["id"] = self._ids.number(_encode(event.id))
            end: JsonEvent = {} if event.point == "start" else {"bp": "e"}
            return {
                "ph": _PHASES[event.point],
                "cat": "flow",
                **made,
                "tid": line.of_instant(position),
                **end,
            }
        if event.args is not None:
            made["args"] = dict(event.args)
        if isinstance(event, Instant):
            return {"ph": "i", **made, "s": "t", "tid": line.of_instant(position)}
        tid = line.of_slice(position, position + dur_ns)
        return {"ph": "X", **made, "tid": tid, "dur": microseconds(dur_ns)}


class _Line:
    """Track of a reader in a row: one track of the timeline, or several if its slices overlap."""

    def __init__(self, track: Track, row: Row, place: Place, tracks: Tracks, owner: str) -> None:
        self.row = row
        self.place = place
        self._track = track
        self._tracks = tracks
        self._owner = f"\0{owner}"
        self._name = track.name
        self._tids: list[int] = []
        self._running: list[list[tuple[int, int]]] = []
        """Start and end of the open slices in each lane, if slices may overlap."""

    def rename(self, name: str) -> None:
        for lane in range(len(self._tids)):
            self._tracks.call(self.row, self._tids[lane], _numbered(name, lane), self._track.sort)
        self._name = name

    def of_slice(self, start: int, end: int) -> int:
        """Return the tid of a slice from `start` to `end`: the first lane in which it nests."""
        if not self._track.overlapping:
            return self._tids[self._lane(0)]
        for running in self._running:
            while running and running[-1][1] <= start:
                running.pop()
        fits = (lane for lane, running in enumerate(self._running) if not running or end <= running[-1][1])
        lane = self._lane(next(fits, len(self._running)))
        self._running[lane].append((start, end))
        return self._tids[lane]

    def of_instant(self, at: int) -> int:
        """Return the tid of an event without a duration: the lane of the running slice that began last."""
        running = [(*slices[-1], lane) for lane, slices in enumerate(self._running) if slices]
        _, _, lane = max((slice_ for slice_ in running if slice_[0] <= at <= slice_[1]), default=(0, 0, 0))
        return self._tids[self._lane(lane)]

    def _lane(self, lane: int) -> int:
        if lane == len(self._tids):
            name = _numbered(self._name, lane)
            self._tids.append(self._tracks.own(self.row, name, self._track.sort, self._owner))
            self._running.append([])
        return lane


def _numbered(name: str, lane: int) -> str:
    return name if lane == 0 else f"{name} ({lane + 1})"
