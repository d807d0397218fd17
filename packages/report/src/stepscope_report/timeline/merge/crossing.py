"""Slices of one thread that overlap without nesting.

Perfetto drops the later of two such slices. For example, a range of the user begins inside the call of
`__enter__` and ends after this call. Or a GPU starts a kernel before the previous kernel has ended.

Each slice is put on the first line of its thread on which it nests with all slices that come before it in the
file. Most files have events sorted by start, or a few such runs one after another: operators, then calls of
Python, then calls of CUDA. Within a run, a stack of ends is enough. Against earlier runs, a slice is compared
with the slices that are open at its two ends. Each slice of a file takes 20 bytes of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from typing import Any, NamedTuple

_MOST_LINES = 16
"""Largest number of lines of a thread. A slice that fits on none of them stays on the first."""
_SHORTER_US = 0.0004
"""Time in us, less than a ns, by which each end is stored too early. Slices that touch then do not overlap,
however start and duration are rounded."""
_EQUAL_US = 0.0002
"""Ends that differ by less than this time in us are equal."""
_NEAR = 512
"""A late slice is inserted into a run if it belongs among this many last slices: some files are sorted
by ends."""
_JOINED = 8
"""Number of runs that are joined into one. As many joined runs are joined again."""
_ALWAYS = float("inf")


class Moved(NamedTuple):
    """A slice that needs a further line."""

    at: int
    """Number of the slice among the events of its batch."""
    track: int
    line: int


class _Run:
    """Slices of a line by start. Of slices with the same start, the one with the latest end comes first."""

    def __init__(self, slices: Iterable[tuple[float, float]] = (), joins: int = 0) -> None:
        self.starts = array("d")
        self.ends = array("d")
        for start, end in slices:
            self.starts.append(start)
            self.ends.append(end)
        self.late_starts, self.late_ends = list[float](), list[float]()
        """The latest slices, until `settle`: lists grow three times as fast as arrays."""
        self.joins = joins
        self._outer = array("i")
        """Number of the slice around each slice, or -1. Computed when needed."""
        self._latest = 0
        """Number of slices that begin no later than the last slice that was compared."""

    def settle(self) -> None:
        self.starts.fromlist(self.late_starts)
        self.ends.fromlist(self.late_ends)
        self.late_starts.clear()
        self.late_ends.clear()

    def room(self, start: float, end: float) -> float:
        """Return the first start or end in this run after `start`. A slice that begins at `start` and ends
        before this time crosses no slice of the run. Return -infinity if the slice until `end` crosses one.
        """
        starts, ends, outer = self.starts, self.ends, self._outer
        size = len(starts)
        if len(outer) < size:
            self._nest()
        after = self._latest
        if after and starts[after - 1] > start:
            after = bisect_right(starts, start)
        following = starts[after] if after < size else _ALWAYS
        if following <= start:
            after += 1
            following = starts[after] if after < size else _ALWAYS
            if following <= start:
                after = bisect_right(starts, start, after)
                following = starts[after] if after < size else _ALWAYS
        self._latest = after
        at = after - 1
        while at >= 0 and ends[at] <= start:
            at = outer[at]
        until = ends[at] if at >= 0 else _ALWAYS
        if end > until + _EQUAL_US:
            while at >= 0 and starts[at] == start:
                at = outer[at]
            if at >= 0 and end > ends[at] + _EQUAL_US:
                return -_ALWAYS
        if following < end:
            at = bisect_left(starts, end, after) - 1
            while at >= after:
                if ends[at] > end + _EQUAL_US:
                    return -_ALWAYS
                at = outer[at]
        return following if following < until else until

    def _nest(self) -> None:
        ends, outer = self.ends, self._outer
        at = len(outer) - 1
        for number in range(len(outer), len(ends)):
            start = self.starts[number]
            while at >= 0 and ends[at] <= start:
                at = outer[at]
            outer.append(at)
            at = number

    def insert(self, start: float, end: float) -> None:
        at = bisect_right(self.starts, start)
        while at and self.starts[at - 1] == start and self.ends[at - 1] < end:
            at -= 1
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        del self._outer[at:]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.starts, self.ends, strict=True)


def _joined(runs: list[_Run]) -> _Run:
    slices = merge(*runs, key=lambda slice_: (slice_[0], -slice_[1]))
    return _Run(slices, runs[0].joins + 1)


class _Line:
    """A line of a thread, on which all slices nest."""

    def __init__(self) -> None:
        self.run = _Run()
        self.open = [_ALWAYS]
        """Ends of the slices of the run that are open at `latest`, from the outermost."""
        self.now = -_ALWAYS
        self.earlier = list[_Run]()
        self.since, self.until = -_ALWAYS, _ALWAYS
        """Slices between these times cross none of the earlier runs."""

    def latest(self) -> float:
        """Return the latest start of the run, or of a slice that did not nest in it."""
        self.run.settle()
        starts = self.run.starts
        return max(self.now, starts[-1]) if starts else self.now

    def is_free(self, start: float, end: float) -> bool:
        """Return whether a slice crosses none of the earlier runs."""
        if self.since <= start and end <= self.until:
            return True
        until = _ALWAYS
        for run in self.earlier:
            room = run.room(start, end)
            if room == -_ALWAYS:
                return False
            if room < until:
                until = room
        self.since, self.until = start, until
        return True

    def takes(self, start: float, end: float) -> bool:
        """Add a slice if it nests, and return whether it was added."""
        if not self.is_free(start, end):
            return False
        still = self.open
        latest = self.latest()
        if start > latest:
            while still[-1] <= start:
                still.pop()
            if end > still[-1] + _EQUAL_US:
                self.now = start
                return False
            still.append(end)
            self.run.late_starts.append(start)
            self.run.late_ends.append(end)
            return True
        if self.run.room(start, end) == -_ALWAYS:
            return False
        starts = self.run.starts
        if starts and start < starts[max(0, len(starts) - _NEAR)]:
            self._begin_run()
            return self.takes(start, end)
        if end > latest:
            at = len(still)
            while still[at - 1] < end:
                at -= 1
            still.insert(at, end)
        self.run.insert(start, end)
        return True

    def _begin_run(self) -> None:
        earlier = self.earlier
        earlier.append(self.run)
        while len(latest := earlier[-_JOINED:]) == _JOINED and latest[0].joins == latest[-1].joins:
            earlier[-_JOINED:] = [_joined(latest)]
        self.run, self.open = _Run(), [_ALWAYS]
        self.now, self.since, self.until = -_ALWAYS, _ALWAYS, -_ALWAYS


class Lines:
    """The lines of all threads of one file."""

    def __init__(self) -> None:
        self._threads: dict[int, list[_Line]] = {}
        self.moved = 0
        """Number of slices that are not on the first line of their thread."""

    def line_of(self, track: int, start_us: float, dur_us: float) -> int:
        """Add a slice of a track of the timeline. Return the number of its line."""
        return self._line(self._thread(track), start_us, start_us + dur_us - _SHORTER_US)

    def _thread(self, track: int) -> list[_Line]:
        lines = self._threads.get(track)
        if lines is None:
            lines = self._threads[track] = [_Line()]
        return lines

    def _line(self, lines: list[_Line], start: float, end: float) -> int:
        for number, line in enumerate(lines):
            if line.takes(start, end):
                self.moved += number > 0
                return number
        if len(lines) == _MOST_LINES:
            return 0
        lines.append(_Line())
        lines[-1].takes(start, end)
        self.moved += 1
        return len(lines) - 1

    def place(self, events: Sequence[Any], tracks: Mapping[int, int]) -> list[Moved]:
        """Add the slices among these events. Return the slices that need a further line.

        This method runs for each event of a file. Slices that come in the order of their starts and cross
        nothing are handled here, without a call.

        Args:
            tracks: {tid of an event: its track in the timeline}.
        """
        moved = list[Moved]()
        tid, at, lines, shorter_us = -1, 0, [_Line()], _SHORTER_US
        line = lines[0]
        latest = until = end_above = _ALWAYS
        still, starts, ends = list[float](), line.run.late_starts, line.run.late_ends
        for event in events:
            if event.ph != "X":
                continue
            if tid is not event.tid:  # msgspec gives equal values of a `Literal` as one object
                still.append(end_above)
                tid = event.tid
                lines = self._thread(tracks[tid])
                line = lines[0]
                latest, until, still = line.latest(), line.until, line.open
                starts, ends = line.run.late_starts, line.run.late_ends
                end_above = still.pop()
            start = event.ts
            end = start + event.dur - shorter_us
            if start > latest:
                while end_above <= start:
                    end_above = still.pop()
                free = end <= end_above
                if free and end > until:
                    free = line.is_free(start, end)
                    until = line.until
                if free:
                    still.append(end_above)
                    starts.append(start)
                    ends.append(end)
                    end_above = end
                    latest = start
                    continue
                line.now = start
            still.append(end_above)
            number = self._line(lines, start, end)
            if number:
                while events[at] is not event:
                    at += 1
                moved.append(Moved(at, tracks[tid], number))
            tid, still = -1, []  # forget the track, because its line may have begun another run
        still.append(end_above)
        return moved
