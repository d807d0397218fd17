"""Counters of a step, on the clock of the capture's owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.timeline.clocks.align import Placement
from stepscope.timeline.model import Counter
from stepscope.timeline.record_files import CounterFile
from stepscope.timeline.sources import Source


def counters_of(sources: Sequence[Source], places: Sequence[Placement]) -> Iterator[Counter]:
    """Yield the counters of each source, in order."""
    for process, (source, place) in enumerate(zip(sources, places, strict=True)):
        if source.counters is not None:
            yield from _placed(source.counters, process, place)


def _placed(file: CounterFile, process: int, place: Placement) -> Iterator[Counter]:
    times: dict[int, list[int]] = {}
    values: dict[int, list[float]] = {}
    for sample in file.samples:
        at_ns = place(sample.at_ns)
        for number, value in sample.values.items():
            times.setdefault(number, []).append(at_ns)
            values.setdefault(number, []).append(value)
    for number, series in file.series.items():
        if number in times:
            yield Counter(
                process=process,
                name=series.name,
                of=series.of,
                unit=series.unit,
                kind=series.how,
                scope=series.scope,
                times_ns=tuple(times[number]),
                values=tuple(values[number]),
            )
