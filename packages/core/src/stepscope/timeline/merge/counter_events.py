"""Counters as events of a merged timeline: one counter track for each, in the row of its process."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.timeline.merge.time_mapping import Cut
from stepscope.timeline.merge.tracks import Event, microseconds
from stepscope.timeline.model import Counter, Timeline
from stepscope.timeline.selection import Selection
from stepscope.timeline.step.rows import Axis, Row


class CounterTracks:
    """The counters of one timeline that are selected."""

    def __init__(self, timeline: Timeline, axis: Axis, selection: Selection, cut: Cut) -> None:
        self._axis = axis
        self._selection = selection
        self._cut = cut
        self._of_process: dict[int, list[Counter]] = {}
        for counter in timeline.counters:
            self._of_process.setdefault(counter.process, []).append(counter)

    def of(self, row: Row) -> Iterator[Event]:
        """Yield the values of a row's counters. A value that stays the same is one event."""
        if not (self._selection.rank(row.info.rank) and self._selection.role(row.info.role)):
            return
        for counter in self._of_process.get(-1 if row.process is None else row.process, ()):
            name, last = _name(counter), None
            for at_ns, value in _points(counter):
                position = at_ns + (row.shift_ns or 0) - self._axis.base_ns
                if value != last and self._is_inside(position):
                    last = value
                    yield {
                        "ph": "C", "cat": "stepscope", "name": name, "pid": row.pid, "tid": 0,
                        "ts": microseconds(position), "args": {"value": value},
                    }  # fmt: skip

    def _is_inside(self, position: int) -> bool:
        start, end = self._cut
        if position < 0:  # of a clock that is far off: viewers drop it
            return False
        return (start is None or position >= start) and (end is None or position <= end)


def _name(counter: Counter) -> str:
    """Return `GPU 3: GPU power [W]`, `process memory [B]`."""
    unit = f" [{counter.unit}]" if counter.unit else ""
    return f"{counter.of}: {counter.name}{unit}" if counter.of else f"{counter.name}{unit}"


def _points(counter: Counter) -> Iterator[tuple[int, float]]:
    """Yield (time from which a value holds, value).

    A value of an interval holds from the sample before it; the first has none. A total is drawn from 0.
    """
    times, values = counter.times_ns, counter.values
    if counter.kind == "interval":
        yield from zip(times[:-1], values[1:], strict=True)
        return
    first = values[0] if counter.kind == "total" else 0
    yield from zip(times, (value - first for value in values), strict=True)
