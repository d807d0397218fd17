"""Protocol of a counter: a number that a thread of each process samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stepscope.files.counters import CounterKind, CounterScope


class CounterSource(Protocol):
    """One counter: its name, its unit, and its current values. Subclass it to add a counter.

    To add counters, a package registers a function without arguments, which returns a list of its counters:

        [project.entry-points."stepscope.counters"]
        queues = "my_package:counters"

    The sampling thread calls the function when a capture opens, and once for the flight recorder. Import
    libraries inside the function. If the function raises, the manifest states the reason, and other counters
    are not affected.

    One thread samples all counters, by default ten times a second in a capture and once a second between
    captures. So `sample` must return within microseconds, must not wait, and must not take a lock that the
    recorded code may hold.
    """

    name: str
    """Name that the report shows: `process CPU`, `GPU memory`."""
    unit: str
    """`%`, `B`, `ms`, `W`, `MHz`, `/s`; empty for a plain number."""
    kind: CounterKind = "level"
    """`level`, `interval` or `total`: see `stepscope.files.counters.CounterKind`."""
    scope: CounterScope = "process"
    """`process`, or `host` for a counter that one process of each host samples."""
    interval_s: float = 0.0
    """Shortest time between two samples, or 0 to sample at each tick of the sampler."""

    def sample(self) -> Mapping[str, float]:
        """Return {measured object: current value}. The object is `""` for the process or host itself, else a
        name: `GPU 3`.

        Return {} if there is no value now. A counter whose `sample` raised is not sampled again.
        """
        ...

    def earlier(self) -> Sequence[tuple[int, Mapping[str, float]]]:
        """Return (CLOCK_MONOTONIC in ns, values) for moments between the last two samples, in order.

        Called after `sample`. Override this if the counter knows when its value changed.
        """
        return ()

    def close(self) -> None:
        """Release the resources of the counter. `sample` is not called afterwards."""
        return
