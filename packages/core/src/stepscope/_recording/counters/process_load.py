"""CPU, memory, open files and waits of this process, from the standard library and /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from stepscope.backends.counters import CounterSource
from stepscope.files.counters import CORE_WAIT, DISK_SLEEP, CounterKind


class ProcessCpu(CounterSource):
    """CPU time of all threads, in percent of one core."""

    name = "process CPU"
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._at_ns, self._used_ns = time.monotonic_ns(), time.process_time_ns()

    def sample(self) -> Mapping[str, float]:
        at_ns, used_ns = time.monotonic_ns(), time.process_time_ns()
        passed_ns, spent_ns = at_ns - self._at_ns, used_ns - self._used_ns
        self._at_ns, self._used_ns = at_ns, used_ns
        return {"": 100 * spent_ns / passed_ns} if passed_ns > 0 else {}


class ProcessMemory(CounterSource):
    """Resident memory."""

    name = "process memory"
    unit = "B"
    interval_s = 0.5

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def sample(self) -> Mapping[str, float]:
        with open("/proc/self/statm", "rb") as file:
            return {"": float(int(file.read().split()[1]) * self._page_bytes)}


class OpenFiles(CounterSource):
    """Open file descriptors."""

    name = "open files"
    unit = ""
    interval_s = 1.0  # the kernel lists them all: 1 ms of CPU for 3,000

    def sample(self) -> Mapping[str, float]:
        # One of them is the listing itself.
        return {"": float(len(os.listdir("/proc/self/fd")) - 1)}


class CoreWait(CounterSource):
    """Time in which the main thread had work and no core, in percent of the time since the previous
    sample.
    """

    name = CORE_WAIT
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._at_ns, self._waited_ns = time.monotonic_ns(), _waited_ns()

    def sample(self) -> Mapping[str, float]:
        at_ns, waited_ns = time.monotonic_ns(), _waited_ns()
        passed_ns, since_ns = at_ns - self._at_ns, waited_ns - self._waited_ns
        self._at_ns, self._waited_ns = at_ns, waited_ns
        return {"": min(100.0, 100 * since_ns / passed_ns)} if passed_ns > 0 else {}


def _waited_ns() -> int:
    """Return how long the main thread waited on the run queue so far (sched-stats of the kernel's docs)."""
    with open("/proc/self/schedstat", "rb") as file:
        return int(file.read().split()[1])


class DiskSleep(CounterSource):
    """100 if the main thread waits for a disk or a shared folder (state D of proc(5)), else 0."""

    name = DISK_SLEEP
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._path = f"/proc/self/task/{os.getpid()}/stat"

    def sample(self) -> Mapping[str, float]:
        with open(self._path, "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
        return {"": 100.0 if state == b"D" else 0.0}


def process_load() -> Iterator[CounterSource]:
    """Yield the sources that this operating system supports."""
    yield ProcessCpu()
    if os.path.exists("/proc/self/statm"):
        yield ProcessMemory()
        yield OpenFiles()
    if os.path.exists("/proc/self/schedstat"):
        yield CoreWait()
        yield DiskSleep()
