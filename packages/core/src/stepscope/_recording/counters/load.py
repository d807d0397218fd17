"""Load of this process and of its host. One process of a host samples the host.

CPU, memory, open files and waits come from the standard library and /proc, pauses from Python's garbage
collector, bytes of memory from torch's caching allocators. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from zlib import crc32

from stepscope._recording.process import identity
from stepscope._recording.process.identity import initialised
from stepscope._recording.spans.span import threads
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import (
    CORE_WAIT,
    DISK_SLEEP,
    GC,
    HOST_CPU,
    MEMORY_PRESSURE,
    PROCESS_CPU,
    THREAD_CORE_WAIT,
    TORCH_RESERVED,
    CounterKind,
    CounterScope,
)

_MOST_THREADS = 200
"""Largest number of threads whose waits for a core one sampler tells: a program may start one for each
call."""


class ProcessCpu(CounterSource):
    """CPU time of all threads, in percent of one core."""

    name = PROCESS_CPU
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


class _Waits:
    """Time in which threads had work and no core, since the last call (`schedstat` of the kernel's docs).

    A read of an open file takes 1 us, and opening it 8 us.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """{thread: descriptor of its file}."""
        self._last: dict[int, tuple[int, int]] = {}
        """{thread: (time, its waits until then)}, in ns."""

    def percent(self, thread: int) -> float | None:
        """Return the waits of a thread in percent of the time since the last call for it; 0 at the first
        call, and None if the thread has ended.
        """
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
            at_ns = time.monotonic_ns()
            waited_ns = int(os.pread(self._files[thread], 64, 0).split()[1])
        except ours(OSError):
            self.forget(thread)
            return None
        before_ns, until_then_ns = self._last.get(thread, (at_ns, waited_ns))
        self._last[thread] = at_ns, waited_ns
        if at_ns == before_ns:
            return 0.0
        return min(100.0, 100 * (waited_ns - until_then_ns) / (at_ns - before_ns))

    def forget(self, thread: int) -> None:
        self._last.pop(thread, None)
        file = self._files.pop(thread, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        for thread in list(self._files):
            self.forget(thread)


class CoreWait(CounterSource):
    """Time in which the main thread had work and no core, in percent of the time since the previous
    sample.
    """

    name = CORE_WAIT
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._waits = _Waits()
        self._waits.percent(os.getpid())

    def sample(self) -> Mapping[str, float]:
        percent = self._waits.percent(os.getpid())
        return {} if percent is None else {"": percent}

    def close(self) -> None:
        self._waits.close()


class ThreadCoreWait(CounterSource):
    """The same of each other thread with spans, by its native id. The first sample of a thread is 0."""

    name = THREAD_CORE_WAIT
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._waits = _Waits()
        self._seen: set[int] = set()

    def sample(self) -> Mapping[str, float]:
        found = {}
        for thread in self._threads():
            percent = self._waits.percent(thread)
            if percent is not None:
                found[f"thread {thread}"] = percent
            else:
                with suppress(ValueError):  # another sampler removed it
                    threads.remove(thread)
        return found

    def _threads(self) -> Iterator[int]:
        for thread in tuple(threads):
            if thread in self._seen or (thread != os.getpid() and len(self._seen) < _MOST_THREADS):
                self._seen.add(thread)
                yield thread

    def close(self) -> None:
        self._waits.close()


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
        yield ThreadCoreWait()
        yield DiskSleep()


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


class AllocatorBytes(CounterSource):
    """One figure of `memory_stats` for each device on which this process holds memory."""

    unit = "B"
    interval_s = 1.0  # torch makes a dict of 100 figures for it: 0.2 ms

    def __init__(self, name: str, figure: str) -> None:
        self.name = name
        self._figure = figure

    def sample(self) -> Mapping[str, float]:
        return {
            f"{kind}:{device}": float(stats[self._figure])
            for kind, module in initialised()
            for device in range(module.device_count())
            if (stats := module.memory_stats(device)).get("reserved_bytes.all.current")
        }


def allocators() -> Iterator[CounterSource]:
    """Yield the sources: the tensors' bytes, and what the allocators hold for them."""
    yield AllocatorBytes("torch allocated", "allocated_bytes.all.current")
    yield AllocatorBytes(TORCH_RESERVED, "reserved_bytes.all.current")


class HostCpu(CounterSource):
    """Busy time of all cores of the host, in percent of all of them (proc_stat(5))."""

    name = HOST_CPU
    unit = "%"
    kind: CounterKind = "interval"
    scope: CounterScope = "host"
    interval_s = 0.5  # on a host with hundreds of cores the kernel takes 1 ms to write the file

    def __init__(self, claim: HostClaim) -> None:
        self._claim = claim
        self._busy, self._all = _ticks()

    def sample(self) -> Mapping[str, float]:
        busy, whole = _ticks()
        busy_since, since = busy - self._busy, whole - self._all
        self._busy, self._all = busy, whole
        return {"": 100 * busy_since / since} if since > 0 else {}

    def close(self) -> None:
        self._claim.free()


def _ticks() -> tuple[int, int]:
    """Return the busy time and the whole time of all cores since the host booted, in clock ticks."""
    with open("/proc/stat", "rb") as file:
        user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
    busy = user + nice + system + sum(rest[:3])  # irq, softirq, steal; guests are part of user
    return busy, busy + idle + iowait


class MemoryPressure(CounterSource):
    """Time in which every program of the host that had work stood still for want of memory, in percent.

    This is `full` of the kernel's PSI: `some` may be of a program that is none of the run's.
    """

    name = MEMORY_PRESSURE
    unit = "%"
    kind: CounterKind = "interval"
    scope: CounterScope = "host"
    interval_s = 0.5
    file = "/proc/pressure/memory"

    def __init__(self) -> None:
        self._at_ns, self._stalled_us = time.monotonic_ns(), self._total_us()

    def sample(self) -> Mapping[str, float]:
        at_ns, stalled_us = time.monotonic_ns(), self._total_us()
        passed_ns, since_us = at_ns - self._at_ns, stalled_us - self._stalled_us
        self._at_ns, self._stalled_us = at_ns, stalled_us
        return {"": min(100.0, 1e5 * since_us / passed_ns)} if passed_ns > 0 else {}

    def _total_us(self) -> int:
        with open(self.file, "rb") as file:
            full = next(line for line in file if line.startswith(b"full"))
        return int(full.rpartition(b"total=")[2])


def host_load(claim: HostClaim) -> Iterator[CounterSource]:
    """Yield the sources if this process has the right to sample the host, and give the right back at the
    end.
    """
    if claim.taken:
        yield HostCpu(claim)
        try:
            pressure = MemoryPressure()
        except ours(OSError, ValueError, StopIteration):  # the kernel was built without it
            return
        yield pressure


class HostClaim:
    """The right to sample the counters of the host. The first process that asks for it in a step gets it.

    It is the name of a socket, which the kernel frees when its process closes it or ends. Nothing is sent.
    """

    def __init__(self, step_folder: str) -> None:
        name = f"\0stepscope-counters-{os.getuid()}-{crc32(step_folder.encode()):08x}"
        self.taken = True
        """True if this process has the right."""
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(name)
        except ours(OSError) as error:
            # Where such names are not allowed, every process samples the host: that costs more, and is right.
            self.taken = error.errno != errno.EADDRINUSE
            self.free()

    def free(self) -> None:
        """Give the right back. Idempotent."""
        held, self._socket = self._socket, None
        if held is not None:
            with suppress(OSError):
                held.close()


_STORE = "object_store_memory"
"""Ray's name of the resource. Its available amount follows the bytes that objects occupy within about a
second."""


class ObjectStore(CounterSource):
    """Bytes that objects occupy in the shared memory of all nodes."""

    name = "Ray object store"
    unit = "B"
    interval_s = 2.0  # two calls to the cluster's head

    def sample(self) -> Mapping[str, float]:
        ray = identity.connected()
        if ray is None:
            return {}
        whole = ray.cluster_resources().get(_STORE)
        if whole is None:
            return {}
        return {"": max(0.0, whole - ray.available_resources().get(_STORE, 0.0))}


def ray_store() -> Iterator[CounterSource]:
    """Yield the source. It has no values in a process that is not connected to a cluster."""
    yield ObjectStore()
