"""The last counters of a step, of every process that sampled some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stepscope.files.layout import StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import RECENT_NS, CounterNow
from stepscope.timeline.record_files import CounterFile, read_counters


def latest_counters(step: StepLayout) -> list[tuple[ProcessInfo, tuple[CounterNow, ...]]]:
    """Return the means of the last seconds in the files of counters, as a state of a process has them."""
    files = (read_counters(path) for path in sorted(step.counters.glob("[!.]*.jsonl")))
    return [(file.header.process, tuple(_means(file))) for file in files if file.header is not None]


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
