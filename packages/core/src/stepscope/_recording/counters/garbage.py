"""Pauses of Python's garbage collector, in which no other Python code of the process runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

from stepscope.backends.counters import CounterSource
from stepscope.files.counters import GC, CounterKind


class _Pauses:
    """Lengths of the collector's runs, by `gc.callbacks`. No lock: a run may begin at any allocation.

    The callback is a chain of C functions. In a callback of Python code, an exception that a signal's handler
    raises would be printed as ignored, and never reach the code that the signal was meant for.
    """

    def __init__(self) -> None:
        self.sum_ns = 0
        self.longest_ns = 0
        """Longest run of the collector in ns since the last call of `take_longest`."""
        self._times: dict[int, int] = {}
        """{number: monotonic ns}: two at the start of a run and two at its end, one for each argument."""
        self._read = 0
        times = map(self._times.setdefault, count(), iter(time.monotonic_ns, None))
        self._called = partial(max, key=partial(next, times))  # max(phase, info) asks for two times
        gc.callbacks.append(self._called)

    def read(self) -> None:
        """Add the collector's runs that have ended since the last call."""
        while self._read + 3 in self._times:
            began_ns, _, ended_ns, _ = (self._times.pop(self._read + place) for place in range(4))
            self._read += 4
            self.sum_ns += ended_ns - began_ns
            self.longest_ns = max(self.longest_ns, ended_ns - began_ns)

    def take_longest(self) -> int:
        self.read()
        longest_ns, self.longest_ns = self.longest_ns, 0
        return longest_ns

    def end(self) -> None:
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)


class GarbageShare(CounterSource):
    """Time in the collector, in percent of the time since the previous sample."""

    name = GC
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self, pauses: _Pauses) -> None:
        self._pauses = pauses
        self._at_ns, self._sum_ns = time.monotonic_ns(), 0

    def sample(self) -> Mapping[str, float]:
        self._pauses.read()
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
