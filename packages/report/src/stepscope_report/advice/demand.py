"""The demand of a step for engines and tools at once, for settings that limit these numbers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from stepscope.files.counters import KV_CACHE, RUNNING_REQUESTS, WAITING_REQUESTS
from stepscope_report.spans import is_tool, placed
from stepscope_report.timeline import Timeline
from stepscope_report.whatif.limits import peak

FULL = 95
"""A KV cache counts as full from this percentage on."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand of one step. A number is None if nothing recorded tells it."""

    fitting_requests: int | None = None
    """Number of requests that ran in a replica while its KV cache was full: the median of its samples, and
    the least of the replicas."""
    requests_at_once: int | None = None
    """Largest number of requests that a replica ran or let wait."""
    tools_at_once: int | None = None
    """Largest number of tools that ran or waited."""


def step_demand(timeline: Timeline) -> Demand:
    fitting: dict[tuple[int, str], list[float]] = defaultdict(list)
    for engine, used, running in _together(timeline, KV_CACHE, RUNNING_REQUESTS):
        if used >= FULL and running >= 1:
            fitting[engine].append(running)
    load = [
        round(running + waiting)
        for _, running, waiting in _together(timeline, RUNNING_REQUESTS, WAITING_REQUESTS)
    ]
    load += (
        running + waiting
        for engine in timeline.passes
        for running, waiting in zip(engine.noted.passes.running, engine.noted.passes.waiting, strict=True)
    )
    tools = placed(timeline, (span for span in timeline.spans if is_tool(span.role, span.stage)))
    return Demand(
        fitting_requests=min((round(statistics.median_low(runs)) for runs in fitting.values()), default=None),
        requests_at_once=max(load, default=None),
        tools_at_once=peak(tools) or None,
    )


def _together(timeline: Timeline, one: str, other: str) -> Iterator[tuple[tuple[int, str], float, float]]:
    """Yield (process and engine, value, value of the other) of two counters that were sampled at one time."""
    series: dict[str, dict[tuple[int, str], dict[int, float]]] = {one: {}, other: {}}
    for counter in timeline.counters:
        if counter.name in series:
            times = dict(zip(counter.times_ns, counter.values, strict=True))
            series[counter.name][counter.process, counter.of] = times
    for engine, values in series[one].items():
        others = series[other].get(engine, {})
        for at_ns, value in values.items():
            if at_ns in others:
                yield engine, value, others[at_ns]
