"""Counters of a step on the clock of the capture's owner, and the latest values of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stepscope.files.layout import StepLayout, safe
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import RECENT_NS, CounterNow
from stepscope_report.timeline.clocks.align import Placement
from stepscope_report.timeline.model import Counter
from stepscope_report.timeline.record_files import CounterFile, read_counters
from stepscope_report.timeline.sources import Source


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


def latest_counters(step: StepLayout, run: str) -> list[tuple[ProcessInfo, tuple[CounterNow, ...]]]:
    """Return the means over the last seconds of the counter files, in the form of a live process' state.

    Args:
        run: The id, as in file names, of the run whose files count.
    """
    files = (read_counters(path) for path in sorted(step.counters.glob("[!.]*.jsonl")))
    return [
        (file.header.process, tuple(_means(file)))
        for file in files
        if file.header is not None and safe(file.header.run_id) == run
    ]


def _means(file: CounterFile) -> Iterator[CounterNow]:
    values: dict[int, list[float]] = defaultdict(list)
    since_ns = file.samples[-1].at_ns - RECENT_NS if file.samples else 0
    for sample in file.samples:
        if sample.at_ns > since_ns:
            for number, value in sample.values.items():
                values[number].append(value)
    for number, own in values.items():
        series = file.series.get(number)
        if series is not None and series.how != "total":
            yield CounterNow(name=series.name, of=series.of, value=round(sum(own) / len(own), 3))
