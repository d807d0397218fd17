"""A thread that samples counters at a fixed rate and keeps the latest values in a ring buffer.

Counters are opened, sampled and closed only on this thread, so that their imports do not delay the recorded
code, except for the GIL.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from queue import Empty, SimpleQueue
from time import monotonic_ns, sleep, thread_time_ns
from typing import NamedTuple, TypeAlias

from stepscope._recording.process import failures, fork
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import Series
from stepscope.files.values import bounded

TICKS = 3600
"""Number of ticks that are kept: an hour at 1 Hz, or six minutes at 10 Hz. About 3 MB for one process."""
MOST_SERIES = 1000
"""Largest number of series of one sampler; further series are left out."""
_JOIN_S = 1.0
_DUE = 0.9
"""A counter is due after this fraction of its interval, because ticks are never exactly on time."""
_SLOW_NS = 50_000_000
"""A counter whose last sample took longer is not sampled again at the stop, because the training waits until
the sampler has stopped."""
_STOOD_NS = 20_000_000
"""If the sampling thread stands still for longer within a tick, for example during a garbage collection, the
tick is divided."""


def rounded(value: float) -> float:
    """Return a value rounded to three decimals, or between -1 and 1 to four significant digits."""
    return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")


class AbsentError(Exception):
    """Raised by an opener whose counters cannot be sampled on this machine. The message is the reason. This
    is not an error of stepscope.
    """


Opener: TypeAlias = Callable[[], Iterable[CounterSource]]
"""A function that returns counters, or none if their objects do not exist on this machine. May raise
`AbsentError`."""


class Tick(NamedTuple):
    """The values sampled at one moment."""

    at_ns: int
    """Time of the tick, CLOCK_MONOTONIC in ns."""
    values: dict[int, float]
    """{index in `Sampler.series`: value}."""
    whole: bool = True
    """False if the tick has only some of the counters, because the others were sampled at another time."""


_at_ns = attrgetter("at_ns")


class Sampler:
    """The sampler of one process. After `stop`, `start` may be called again."""

    def __init__(self, openers: Mapping[str, Opener], *, ticks: int = TICKS) -> None:
        """
        Args:
            openers: {name: opener}. Names are the keys of `absent`.
        """
        self.series: list[Series] = []
        """All series so far; the index is the number of a series."""
        self.absent: dict[str, str] = {}
        """{name of an opener or counter that cannot be sampled: reason}."""
        self.since_ns = 0
        """All ticks after this time are still kept; 0 if none was dropped yet. One writer: the sampling
        thread."""
        self.cpu_ns = 0
        """CPU time of the sampling thread so far, in ns."""
        self.ticked: Callable[[], None] | None = None
        """Called on the sampling thread after each tick."""
        self.ended: Callable[[], None] | None = None
        """Called on the sampling thread when the thread ends."""
        self.is_over = False
        """True once the sampling thread has no more work. Set before `ended` is called."""
        self._openers = dict(openers)
        self._added: deque[tuple[str, Opener]] = deque()
        self._numbers: dict[tuple[str, str], int] = {}
        self._ticks: deque[Tick] = deque(maxlen=ticks)
        self._sources: list[CounterSource] = []
        self._due_ns: dict[int, int] = {}
        """{id of a counter: time at which its next sample is due}."""
        self._slow: set[int] = set()
        """Ids of counters whose last sample took longer than `_SLOW_NS`."""
        self._period_ns = 0
        """Time between two ticks; 0 before `start`."""
        # Not an Event, because a signal handler that interrupts `Event.set` would deadlock if it called `set`
        # too.
        self._wake = SimpleQueue[None]()
        self._is_asked = False
        """True if a sample is requested now."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread and open the counters, which may import libraries. `start` begins the sampling.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._period_ns, self._stopping, self.is_over = 0, False, False
        self._thread = threading.Thread(target=self._run, name="stepscope-counters", daemon=True)
        _samplers.add(self)
        self._thread.start()

    def start(self, hz: float) -> None:
        """Sample `hz` times a second from now on. This may also change the rate of a running sampler.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._thread is None or not self._thread.is_alive():
            self.open()
        self._period_ns = round(1e9 / hz)
        self._wake.put(None)

    def add(self, name: str, opener: Opener) -> None:
        """Open further counters now, and sample them until the next stop. May be called from any thread."""
        self._added.append((name, opener))
        self._wake.put(None)

    def stop(self, timeout_s: float = _JOIN_S) -> bool:
        """Take a last sample and end the thread. Return False if a counter still blocks the thread.
        Idempotent.
        """
        self.end()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        try:
            thread.join(timeout_s)
        except ours(RuntimeError):  # the thread's start was interrupted; the thread ends once it runs
            pass
        return not thread.is_alive()

    def end(self) -> None:
        """Make the thread take a last sample and end, without waiting for it."""
        self._stopping = True
        self._wake.put(None)

    def catch_up(self, at_ns: int, timeout_s: float = 0.2) -> None:
        """If the last tick was before `at_ns`, sample now, and wait at most `timeout_s` for the new tick."""
        until = monotonic_ns() + timeout_s * 1e9
        while self._period_ns and not (
            self._ticks and self._ticks[-1].whole and self._ticks[-1].at_ns >= at_ns
        ):
            if self.is_over or self._stopping or monotonic_ns() > until:
                return
            self._is_asked = True
            self._wake.put(None)
            sleep(0.01)

    def between(self, start_ns: int, end_ns: int) -> list[Tick]:
        """Return the kept ticks after `start_ns` and up to `end_ns`, in order (CLOCK_MONOTONIC)."""
        return [tick for tick in tuple(self._ticks) if start_ns < tick.at_ns <= end_ns]

    def around(self, start_ns: int, end_ns: int) -> list[Tick]:
        """Return the kept ticks from the last whole tick before `start_ns` to the first whole tick after
        `end_ns`.
        """
        ticks = tuple(self._ticks)
        before, after = bisect_right(ticks, start_ns, key=_at_ns), bisect_left(ticks, end_ns, key=_at_ns)
        first = next((at for at in range(before - 1, -1, -1) if ticks[at].whole), 0)
        last = next((at for at in range(after, len(ticks)) if ticks[at].whole), len(ticks))
        return list(ticks[first : last + 1])

    def means(self, start_ns: int, end_ns: int) -> dict[Series, float]:
        """Return {series: mean of its samples between `start_ns` and `end_ns`}. A sample counts for the time
        since the one before. Series of the kind `total` and series without samples are left out.
        """
        sums, until_ns = defaultdict[int, float](float), dict[int, int]()
        for tick in self.between(start_ns, end_ns):
            for number, value in tick.values.items():
                sums[number] += value * (tick.at_ns - until_ns.get(number, start_ns))
                until_ns[number] = tick.at_ns
        return {
            series: rounded(sums[series.series] / (until_ns[series.series] - start_ns))
            for series in self.series
            if series.how != "total" and series.series in until_ns
        }

    def forget(self) -> None:
        """Close the counters in a forked child, which has no sampling thread."""
        self._close_sources()

    def _run(self) -> None:
        began_ns = thread_time_ns()
        try:
            self._open_sources()
            while not self._period_ns and not self._stopping:
                self._wake.get()
                self._open_added()
            self._loop(began_ns)
        except ours() as error:
            failures.note("the sampler of counters", error)
        finally:
            self._close_sources()
            _samplers.discard(self)
            self.is_over = True
            if self.ended is not None:
                self.ended()

    def _loop(self, began_ns: int) -> None:
        due_ns, first = monotonic_ns(), True
        while self._period_ns:
            last, first = self._stopping and not first, False
            self._tick()
            self.cpu_ns += (now_ns := thread_time_ns()) - began_ns
            began_ns = now_ns
            if last:
                return
            # Late ticks are skipped. Otherwise a process that was stopped would later be sampled in a burst.
            due_ns = max(due_ns + self._period_ns, monotonic_ns())
            self._wait(due_ns)

    def _wait(self, due_ns: int) -> None:
        """Wait until `due_ns`, the stop, new counters, or a request for a sample."""
        while not self._stopping and (left_ns := min(due_ns - monotonic_ns(), self._period_ns)) > 0:
            try:
                self._wake.get(timeout=left_ns / 1e9)
            except Empty:
                return
            if self._open_added() or self._is_asked:
                return  # sample now

    def _open_sources(self) -> None:
        self._due_ns.clear()
        self._slow.clear()
        for name, opener in self._openers.items():
            self._open(name, opener)
        self._open_added()

    def _open_added(self) -> bool:
        """Open counters that were added, and return whether there were any."""
        added = bool(self._added)
        while self._added:
            self._open(*self._added.popleft())
        return added

    def _open(self, name: str, opener: Opener) -> None:
        try:
            self._sources += opener()
        except AbsentError as reason:
            self.absent[name] = str(reason)
        except ours() as error:
            self.absent[name] = failures.describe(error)
            failures.note(f"the counters of {name}", error)

    def _close_sources(self) -> None:
        sources, self._sources = self._sources, []
        for source in sources:
            try:
                source.close()
            except ours():  # the counter's samples are taken, so an error of `close` does not matter
                pass

    def _tick(self) -> None:
        self._open_added()
        self._is_asked = False
        at_ns, values = monotonic_ns(), dict[int, float]()
        for source in tuple(self._sources):
            if (now_ns := monotonic_ns()) - at_ns > _STOOD_NS:  # the next values begin a new tick
                self._keep(at_ns, values, whole=False)
                at_ns, values = now_ns, {}
            if self._is_due(source, at_ns):
                values.update(self._values(source, at_ns))
        self._keep(at_ns, values)
        if self.ticked is not None:
            self.ticked()

    def _keep(self, at_ns: int, values: dict[int, float], *, whole: bool = True) -> None:
        if not values:
            return
        if len(self._ticks) == self._ticks.maxlen:
            self.since_ns = self._ticks[0].at_ns
        self._ticks.append(Tick(at_ns, values, whole))

    def _is_due(self, source: CounterSource, at_ns: int) -> bool:
        if not source.interval_s:
            return True
        due_ns = self._due_ns.get(id(source))
        asked_at_the_end = self._stopping and id(source) not in self._slow
        if due_ns is not None and at_ns < due_ns and not asked_at_the_end:
            return False
        self._due_ns[id(source)] = at_ns + round(source.interval_s * _DUE * 1e9)
        return True

    def _values(self, source: CounterSource, at_ns: int) -> dict[int, float]:
        """Return the values that a counter has now, and keep its values of earlier moments."""
        began_ns = monotonic_ns()
        try:
            sampled = source.sample()
            for past_ns, values in source.earlier():
                last_ns = self._ticks[-1].at_ns if self._ticks else past_ns
                past_ns = min(max(past_ns, last_ns), at_ns)
                self._keep(past_ns, self._numbered(source, values), whole=False)
            (self._slow.add if monotonic_ns() - began_ns > _SLOW_NS else self._slow.discard)(id(source))
            return self._numbered(source, sampled)
        except ours() as error:
            self._sources.remove(source)
            self.absent[source.name] = failures.describe(error)
            failures.note(f"the counter {source.name}", error)
            return {}

    def _numbered(self, source: CounterSource, sampled: Mapping[str, float]) -> dict[int, float]:
        values = dict[int, float]()
        for of, value in sampled.items():
            number, value = self._number(source, of), float(value)  # numpy numbers are not JSON
            if number is not None and math.isfinite(value):
                values[number] = rounded(value)
        return values

    def _number(self, source: CounterSource, of: str) -> int | None:
        number = self._numbers.get((source.name, of))
        if number is not None or len(self.series) >= MOST_SERIES:
            return number
        number = self._numbers[source.name, of] = len(self.series)
        self.series.append(
            Series(
                series=number,
                name=bounded(source.name),
                of=bounded(of),
                unit=source.unit,
                how=source.kind,
                scope=source.scope,
            )
        )
        return number


_samplers: set[Sampler] = set()
"""Samplers whose threads are running. Writers: `Sampler`, and `_forget` in a forked child."""


def _forget() -> None:
    for sampler in _samplers:
        sampler.forget()
    _samplers.clear()


fork.forgets("counters", _forget)
