"""Contract of a counter: a number that a thread of each process samples while a capture is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stepscope.files.counters import CounterKind, CounterScope


class CounterSource(Protocol):
    """One counter: its name, its unit, and its present values. Inherit from it.

    Another package names a function without arguments under `stepscope.counters`, which returns its counters:

        [project.entry-points."stepscope.counters"]
        queues = "my_package:counters"

    The function is called on the sampling thread when a capture opens, and once for the flight recorder, and
    imports its libraries itself. If it raises, the manifest records the reason, and the other counters go on.

    One thread samples all counters: ten times a second in a capture, and once a second between captures. So a
    sample must take microseconds, take no lock that the recorded code holds, and never wait.
    """

    name: str
    """`process CPU`, `GPU memory`."""
    unit: str
    """`%`, `B`, `ms`, `W`, `MHz`, `/s`; empty for a plain number."""
    kind: CounterKind = "level"
    scope: CounterScope = "process"
    """A counter of the `host` is sampled in one process of each host."""
    interval_s: float = 0.0
    """Shortest time between two samples, or 0 to sample at each tick of the sampler."""

    def sample(self) -> Mapping[str, float]:
        """Return {measured thing: present value}: `GPU 3`, or `""` for the process or host itself.

        Empty if there is none now. A source that raises is not asked again.
        """
        ...

    def close(self) -> None:
        """Release the resources of the source. It is not sampled afterwards."""
        return
