"""Counters of an inference engine, taken from the engine's own metrics.

A server behind HTTP may answer slowly. So each server has a thread that requests its metrics, and the
sampler uses the latest answer. The sampler itself reads the metrics of an engine in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files import counters
from stepscope.files.counters import KV_CACHE, PREEMPTIONS, CounterKind

ASK_S = 1.0
"""Time between a server's answer and the next request. A page of metrics costs the server about 10 ms of
CPU."""
READ_S = 0.5
"""Time between two readings of metrics in this process."""
RUNNING = counters.RUNNING_REQUESTS
WAITING = counters.WAITING_REQUESTS
FINISHED = "finished requests"
UNFINISHED = counters.UNFINISHED_REQUESTS
"""Name of the counter of requests that the engine's front end has not answered. Requests on their way to the
scheduler count too."""
PROMPT_TOKENS = "prompt tokens"
GENERATION_TOKENS = counters.GENERATION_TOKENS
HITS = "prefix cache hits"
"""Name of the counter of prefix cache hits, in percent of the prompt tokens that were looked up since the
previous sample. The engine may state the percentage itself."""
PREFIX_QUERIES = "prefix cache queries"
PREFIX_HITS = "prefix cache hit tokens"
"""Totals from which `HITS` is computed if the engine states no percentage."""
_LEVELS = {WAITING: "", UNFINISHED: "", KV_CACHE: "%"}
_TOTALS = (PREEMPTIONS, PROMPT_TOKENS, GENERATION_TOKENS, FINISHED)


class EngineMetrics:
    """The latest metrics of one engine, and the thread that requests new ones while counters are sampled."""

    def __init__(self, read: Callable[[], Mapping[str, float]], of: str, *, blocks: bool) -> None:
        """
        Args:
            read: Returns {name of a metric, as in this module: value}; empty if the engine keeps no metrics.
                An exception counts as an answer without metrics.
            of: The engine's name in the counters, such as `replica 0`.
            blocks: True if `read` may wait for a server, so that a thread calls it.
        """
        self.latest: Mapping[str, float] = {}
        self.interval_s = ASK_S if blocks else READ_S
        self._read = read
        self._of = of
        self._blocks = blocks
        self._over = threading.Event()
        self._wanted = threading.Event()
        self._is_fresh = False

    def sources(self) -> Sequence[CounterSource]:
        """Return a source for each counter. Sampling the first source reads the metrics for all sources, so
        sample the first source first. Closing the first source ends the thread.
        """
        levels = [_Metric(self, name, unit, "level") for name, unit in _LEVELS.items()]
        totals = [_Metric(self, name, "", "total") for name in _TOTALS]
        if self._blocks:
            threading.Thread(target=self._run, name="stepscope-engine-metrics", daemon=True).start()
        else:
            self._take()  # before the step begins, so that the step's first sample has the totals
            self._is_fresh = True
        return [_Reader(self), *levels, *totals, _HitRate(self)]

    def refresh(self) -> None:
        """Read the metrics again. A server is asked by a thread: then this returns at once, and `values` has
        the new metrics after the server's answer.
        """
        self._wanted.set()
        if not self._blocks and not self._is_fresh:
            self._take()
        self._is_fresh = False

    def end(self) -> None:
        """End the thread after its current request."""
        self._over.set()
        self._wanted.set()

    def values(self, name: str) -> Mapping[str, float]:
        """Return {name of the engine: latest value of the metric `name`}; empty if there is no value."""
        value = self.latest.get(name)
        return {} if value is None else {self._of: value}

    def _run(self) -> None:
        while not self._over.is_set():
            self._take()
            self._over.wait(self.interval_s)
            self._wanted.wait()  # ask the server only while a sampler reads the answers
            self._wanted.clear()

    def _take(self) -> None:
        try:
            self.latest = dict(self._read())
        except ours():  # the engine does not answer; its profiler's start or stop reports why
            self.latest = {}


class _Metric(CounterSource):
    """One metric of an engine."""

    def __init__(self, metrics: EngineMetrics, name: str, unit: str, kind: CounterKind) -> None:
        self.name = name
        self.unit = unit
        self.kind = kind
        self.interval_s = metrics.interval_s
        self._metrics = metrics

    def sample(self) -> Mapping[str, float]:
        return self._metrics.values(self.name)


class _Reader(_Metric):
    """Source of the number of running requests. Sampling it also reads the metrics for all other sources."""

    def __init__(self, metrics: EngineMetrics) -> None:
        super().__init__(metrics, RUNNING, "", "level")

    def sample(self) -> Mapping[str, float]:
        self._metrics.refresh()
        return super().sample()

    def close(self) -> None:
        self._metrics.end()


class _HitRate(_Metric):
    """Percentage of prompt tokens found in the prefix cache since the previous sample."""

    def __init__(self, metrics: EngineMetrics) -> None:
        super().__init__(metrics, HITS, "%", "interval")
        self._last: tuple[float, float] | None = None

    def sample(self) -> Mapping[str, float]:
        latest = self._metrics.latest
        if HITS in latest:
            return self._metrics.values(HITS)
        queries, hits = latest.get(PREFIX_QUERIES), latest.get(PREFIX_HITS)
        if queries is None or hits is None:
            return {}
        last, self._last = self._last, (queries, hits)
        if last is None or queries <= last[0]:
            return {}
        rate = 100 * (hits - last[1]) / (queries - last[0])
        return dict.fromkeys(self._metrics.values(PREFIX_QUERIES), rate)


class Collected:
    """Metric families in the form of a Prometheus registry, for `prometheus_client.generate_latest`."""

    def __init__(self, families: Iterable[object]) -> None:
        self._families = families

    def collect(self) -> Iterable[object]:
        return self._families


def read_page(
    page: str, names: Mapping[str, str], *, percents: Iterable[str] = (KV_CACHE, HITS)
) -> dict[str, float]:
    """Return {name in the result: value} of the metrics on a Prometheus page, summed over the engines on the
    page. Metrics that the page lacks are left out.

    Args:
        names: {name on the page: name in the result}.
        percents: Names in the result of values that the page states between 0 and 1. Their result is the mean
            over the engines, in percent.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in page.splitlines():
        name, value = _sample(line)
        ours = names.get(name)
        if ours is not None and value is not None:
            sums[ours] = sums.get(ours, 0.0) + value
            counts[ours] = counts.get(ours, 0) + 1
    for ours in percents:
        if ours in sums:
            sums[ours] = 100 * sums[ours] / counts[ours]
    return sums


def _sample(line: str) -> tuple[str, float | None]:
    """Return the name and the value of a line `name{labels} value [timestamp]`. The value of any other line
    is None.
    """
    if line.startswith("#"):
        return "", None
    name, _, rest = line.partition("{")
    if rest:
        words = rest.rpartition("}")[2].split()
    else:
        name, *words = line.split() or [""]
    try:
        return name.strip(), float(words[0])
    except (IndexError, ValueError):
        return name, None
