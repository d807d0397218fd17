"""CPU, memory and open files of this process, from the standard library and /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from stepscope.backends.counters import CounterSource
from stepscope.files.counters import CounterKind


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


def process_load() -> Iterator[CounterSource]:
    """Yield the sources that this operating system supports."""
    yield ProcessCpu()
    if os.path.exists("/proc/self/statm"):
        yield ProcessMemory()
        yield OpenFiles()
