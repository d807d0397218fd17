"""Counters of this process and its host. One process of each host samples the host.

CPU, memory, open files and waits are read from the standard library and /proc, pauses from Python's garbage
collector, and bytes from torch's caching allocators. This module does not import torch.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
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
"""Largest number of threads that one `ThreadCoreWait` samples, because a program may start a thread for each
call."""
_LONG_NS = 20_000_000
"""Shortest stretch of garbage collector runs that has values of its own at its begin and end, in ns."""
_NEAR_NS = 5_000_000
"""Time between two runs of the garbage collector, in ns, below which both belong to one stretch."""


class ProcessCpu(CounterSource):
    """CPU time of all threads of the process, in percent of one core."""

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
    """Resident memory of the process."""

    name = "process memory"
    unit = "B"
    interval_s = 0.5

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def sample(self) -> Mapping[str, float]:
        with open("/proc/self/statm", "rb") as file:
            return {"": float(int(file.read().split()[1]) * self._page_bytes)}


class OpenFiles(CounterSource):
    """Number of open file descriptors."""

    name = "open files"
    unit = ""
    interval_s = 1.0  # listing 3,000 descriptors takes 1 ms of CPU

    def sample(self) -> Mapping[str, float]:
        # The listing itself has one descriptor open.
        return {"": float(len(os.listdir("/proc/self/fd")) - 1)}


class ThreadCoreWait(CounterSource):
    """Time in which a thread could run but waited for a core, for each thread with spans except the main
    thread.

    The value is in percent of the time since the previous sample, from the kernel's `schedstat`. The first
    sample of a thread is 0. Files stay open, because a read takes 1 us and opening takes 8 us.
    """

    name = THREAD_CORE_WAIT
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """{native id of a thread that has not ended: file descriptor}."""
        self._last: dict[int, tuple[int, int]] = {}
        """{native id of a thread: (time of the last sample, total wait until then)}, both in ns."""

    def sample(self) -> Mapping[str, float]:
        found, main = {}, os.getpid()
        for thread in tuple(threads):
            if thread in self._last or (thread != main and len(self._last) < _MOST_THREADS):
                percent = self._percent(thread)
                if percent is not None:
                    found[f"thread {thread}"] = percent
                else:
                    with suppress(ValueError):  # another sampler removed the entry
                        threads.remove(thread)
        return found

    def _percent(self, thread: int) -> float | None:
        """Return the waits of a thread in percent of the time since the last call, 0 at the first call, or
        None if the thread has ended.
        """
        is_new = thread not in self._files
        try:
            if is_new:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
            at_ns = time.monotonic_ns()
            waited_ns = int(os.pread(self._files[thread], 64, 0).split()[1])
        except ours(OSError):
            if thread in self._files:
                os.close(self._files.pop(thread))
            return None
        before_ns, until_then_ns = (at_ns, waited_ns) if is_new else self._last[thread]
        self._last[thread] = at_ns, waited_ns
        if at_ns == before_ns:
            return 0.0
        return min(100.0, 100 * (waited_ns - until_then_ns) / (at_ns - before_ns))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class CoreWait(ThreadCoreWait):
    """Time in which the main thread could run but waited for a core, in percent."""

    name = CORE_WAIT

    def sample(self) -> Mapping[str, float]:
        percent = self._percent(os.getpid())
        return {} if percent is None else {"": percent}


class DiskSleep(CounterSource):
    """100 if the main thread is in disk sleep (state D in proc(5)), for example for a shared folder; else
    0.
    """

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
    """Yield the counters of this process, as far as the operating system supports them."""
    yield ProcessCpu()
    if os.path.exists("/proc/self/statm"):
        yield ProcessMemory()
        yield OpenFiles()
    if os.path.exists("/proc/self/schedstat"):
        yield CoreWait()
        yield ThreadCoreWait()
        yield DiskSleep()


class GarbageShare(CounterSource):
    """Time in the garbage collector, in percent of the time since the previous sample. `gc.callbacks` report
    when each run begins and ends. No lock is used, because a run may begin at any allocation.

    The callback consists of C functions only. If the callback had Python code, an exception of a signal
    handler could be raised inside the callback. There, Python prints and ignores exceptions, so the user's
    code would not get it.
    """

    name = GC
    unit = "%"
    kind: CounterKind = "interval"

    def __init__(self) -> None:
        self.longest_ns = 0
        """Longest run of the collector since the last sample of `LongestPause`, in ns."""
        self._ended_ns = 0
        """Total duration of the runs that have ended."""
        self._at_ns, self._until_then_ns = time.monotonic_ns(), 0
        self._times: dict[int, int] = {}
        """{number: monotonic ns}. Each run of the collector has four entries: two for its start, two for its
        end."""
        self._read = 0
        self._stretches = list[tuple[int, int, int, int]]()
        """(begin, end, total at the begin, total at the end) of runs in close succession since the last
        sample, in ns."""
        self._earlier = list[tuple[int, Mapping[str, float]]]()
        """Values at the beginnings and ends of long stretches since the last sample."""
        times = map(self._times.setdefault, count(), iter(time.monotonic_ns, None))
        # `max(phase, info)` calls its key for both arguments, so each call notes the time twice.
        self._called = partial(max, key=partial(next, times))
        gc.callbacks.append(self._called)

    def read(self) -> None:
        """Add the runs that have ended since the last call."""
        while self._read + 3 in self._times:
            began_ns, _, ended_ns, _ = map(self._times.pop, range(self._read, self._read + 4))
            self._read += 4
            self.longest_ns = max(self.longest_ns, ended_ns - began_ns)
            total_ns = self._ended_ns
            self._ended_ns += ended_ns - began_ns
            if self._stretches and began_ns - self._stretches[-1][1] < _NEAR_NS:
                began_ns, _, total_ns, _ = self._stretches.pop()
            self._stretches.append((began_ns, ended_ns, total_ns, self._ended_ns))

    def sample(self) -> Mapping[str, float]:
        self.read()
        stretches, self._stretches = self._stretches, []
        edges = (
            edge
            for began_ns, ended_ns, before_ns, after_ns in stretches
            if ended_ns - began_ns >= _LONG_NS
            for edge in ((began_ns, before_ns), (ended_ns, after_ns))
        )
        self._earlier = [(at_ns, self._since(at_ns, ns)) for at_ns, ns in edges if at_ns > self._at_ns]
        began_ns, at_ns = self._times.get(self._read), time.monotonic_ns()
        total_ns = self._ended_ns
        if began_ns is not None:  # a finalizer let this thread run within a run of the collector
            total_ns += min(at_ns, self._times.get(self._read + 2, at_ns)) - began_ns
        return self._since(at_ns, total_ns)

    def earlier(self) -> Sequence[tuple[int, Mapping[str, float]]]:
        return self._earlier

    def _since(self, at_ns: int, total_ns: int) -> Mapping[str, float]:
        """Return the share of time in the collector from the previous value to `at_ns`."""
        passed_ns, paused_ns = at_ns - self._at_ns, total_ns - self._until_then_ns
        self._at_ns, self._until_then_ns = at_ns, total_ns
        return {"": 100 * paused_ns / passed_ns} if passed_ns > 0 else {}

    def close(self) -> None:
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)


class LongestPause(CounterSource):
    """Longest run of the garbage collector since the previous sample."""

    name = "longest pause of the garbage collector"
    unit = "ms"
    kind: CounterKind = "interval"

    def __init__(self, garbage: GarbageShare) -> None:
        self._garbage = garbage

    def sample(self) -> Mapping[str, float]:
        self._garbage.read()
        longest_ns, self._garbage.longest_ns = self._garbage.longest_ns, 0
        return {"": longest_ns / 1e6}


def garbage() -> Iterator[CounterSource]:
    """Yield the counters of Python's garbage collector."""
    share = GarbageShare()
    yield share
    yield LongestPause(share)


class AllocatorBytes(CounterSource):
    """One figure of torch's `memory_stats` for each device on which this process has reserved memory."""

    unit = "B"
    interval_s = 1.0  # torch returns a dict of 100 figures, which takes 0.2 ms

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
    """Yield counters of the bytes in tensors, and of the bytes that torch's allocators have reserved."""
    yield AllocatorBytes("torch allocated", "allocated_bytes.all.current")
    yield AllocatorBytes(TORCH_RESERVED, "reserved_bytes.all.current")


class HostCpu(CounterSource):
    """Busy time of the host's cores, in percent of all cores (proc_stat(5))."""

    name = HOST_CPU
    unit = "%"
    kind: CounterKind = "interval"
    scope: CounterScope = "host"
    interval_s = 0.5  # with hundreds of cores, reading the file takes 1 ms

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
    """Return the busy time and the total time of all cores since boot, in clock ticks."""
    with open("/proc/stat", "rb") as file:
        user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
    # `rest` begins with irq, softirq and steal; `user` includes guest.
    busy = user + nice + system + sum(rest[:3])
    return busy, busy + idle + iowait


class MemoryPressure(CounterSource):
    """Time in which all non-idle programs of the host were stalled because memory was short, in percent.

    This is `full` of the kernel's PSI. `some` would also count a single program outside of the run.
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
            full = file.read().partition(b"full ")[2]
        return int(full.partition(b"total=")[2].partition(b"\n")[0])


def host_load(claim: HostClaim) -> Iterator[CounterSource]:
    """Yield the counters of the host, if this process may sample the host. Their `close` frees the claim."""
    if claim.taken:
        yield HostCpu(claim)
        try:
            pressure = MemoryPressure()
        except ours(OSError, ValueError):  # the kernel was built without PSI
            return
        yield pressure


class HostClaim:
    """A claim on sampling the host. The first process that makes the claim for a step may sample.

    The claim is the name of a socket, which the kernel frees when the process closes the socket or ends.
    Nothing is sent.
    """

    def __init__(self, step_folder: str) -> None:
        name = f"\0stepscope-counters-{os.getuid()}-{crc32(step_folder.encode()):08x}"
        self.taken = True
        """True if this process may sample the host."""
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(name)
        except ours(OSError) as error:
            # If such sockets are not allowed, every process samples the host, which costs more but is
            # correct.
            self.taken = error.errno != errno.EADDRINUSE
            self.free()

    def free(self) -> None:
        """Free the claim. Idempotent."""
        held, self._socket = self._socket, None
        if held is not None:
            with suppress(OSError):
                held.close()


_STORE = "object_store_memory"
"""Ray's name for the memory of its object store. Ray updates the available amount about once a second."""


class ObjectStore(CounterSource):
    """Bytes of Ray objects in the shared memory of all nodes."""

    name = "Ray object store"
    unit = "B"
    interval_s = 2.0  # each sample makes two calls to the head node

    def sample(self) -> Mapping[str, float]:
        ray = identity.connected()
        if ray is None:
            return {}
        whole = ray.cluster_resources().get(_STORE)
        if whole is None:
            return {}
        return {"": max(0.0, whole - ray.available_resources().get(_STORE, 0.0))}


def ray_store() -> Iterator[CounterSource]:
    """Yield the counter of Ray's object store, which has no values if the process is not connected to Ray."""
    yield ObjectStore()
