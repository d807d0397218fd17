"""Pauses of Python's garbage collector, in which no other Python code of the process runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping

from stepscope.backends.counters import CounterSource
from stepscope.files.counters import GC, CounterKind


class _Pauses:
    """Lengths of the collector's runs, by `gc.callbacks`. No lock: a run may begin at any allocation."""

    def __init__(self) -> None:
        self.sum_ns = 0
        self.longest_ns = 0
        """Longest run of the collector in ns since the last call of `take_longest`."""
        self._began_ns: int | None = None
        gc.callbacks.append(self._called)

    def take_longest(self) -> int:
        longest_ns, self.longest_ns = self.longest_ns, 0
        return longest_ns

    def end(self) -> None:
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: Mapping[str, int]) -> None:
        del info
        if phase == "start":
            self._began_ns = time.monotonic_ns()
        elif self._began_ns is not None:
            lasted_ns = time.monotonic_ns() - self._began_ns
            self._began_ns = None
            self.sum_ns += lasted_ns
            self.longest_ns = max(self.longest_ns, lasted_ns)


class GarbageShare(CounterSource):
    """Time in the collector, in percent of the time since the previous sample."""

    name = GC
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self, pauses: _Pauses) -> None:
        self._pauses = pauses
        self._at_ns, self._sum_ns = time.monotonic_ns(), 0

    def sample(self) -> Mapping[str, float]:
        at_ns, sum_ns = time.monotonic_ns(), self._pauses.sum_ns
        passed_ns, paused_ns = at_ns - self._at_ns, sum_ns - self._sum_ns
        self._at_ns, self._sum_ns = at_ns, sum_ns
        return {"": 100 * paused_ns / passed_ns} if passed_ns > 0 else {}

    def close(self) -> None:
        self._pauses.end()


class LongestPause(CounterSource):
    """Longest run of the collector since the previous sample."""

    name = "longest pause of the garbage collector"
    unit = "ms"
    kind: CounterKind = "interval"

    def __init__(self, pauses: _Pauses) -> None:
        self._pauses = pauses

    def sample(self) -> Mapping[str, float]:
        return {"": self._pauses.take_longest() / 1e6}


def garbage() -> Iterator[CounterSource]:
    """Yield the sources of the collector."""
    pauses = _Pauses()
    yield GarbageShare(pauses)
    yield LongestPause(pauses)
