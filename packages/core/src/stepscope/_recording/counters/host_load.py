"""CPU load of the host, use of Ray's object store, and the choice of the one process that samples a host."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from zlib import crc32

from stepscope._recording.process import ray_connection
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import HOST_CPU, MEMORY_PRESSURE, CounterKind, CounterScope


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
        ray = ray_connection.connected()
        if ray is None:
            return {}
        whole = ray.cluster_resources().get(_STORE)
        if whole is None:
            return {}
        return {"": max(0.0, whole - ray.available_resources().get(_STORE, 0.0))}


def ray_store() -> Iterator[CounterSource]:
    """Yield the source. It has no values in a process that is not connected to a cluster."""
    yield ObjectStore()
