"""The rule by which all readers believe a time: by its value, never by the name of its field.

A wall clock shows a time from 2000 to 2099. Times before 2000 count from something else, as the start of a
machine or of a recording: they are on a clock of their own, which nothing aligns with others. Events of a
step are in it or at most an hour away. Traces of others belong to no step: their events are at most an hour
from the others of their file. Every reader leaves out what is farther away, and counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MARGIN_NS = 3_600_000_000_000
"""Largest plausible distance of a time from its step: an hour."""
MARGIN_US = MARGIN_NS / 1000
_WALL_NS = range(946_684_800 * 10**9, 4_102_444_800 * 10**9)
"""The years 2000 to 2099, in unix ns."""
FARTHEST_NS = 1 << 62
"""Times beyond 146 years (of uptime, or since 1970) are taken for garbage."""
FEW = 50
"""Number of times that tell the clock of a file, if it has as many."""
NOT_NEAR = "events more than an hour from the step, or from all others"
OWN_CLOCK = "its times are of no wall clock (before 2000, no baseTimeNanoseconds)"


def is_wall(at_ns: int) -> bool:
    """Return whether a time in ns is one that a wall clock shows."""
    return at_ns in _WALL_NS


def wall_base(base_ns: int | None, at_us: float | None) -> int | None:
    """Return the unix ns at which the times of a trace begin, or None if it has a clock of its own.

    Args:
        base_ns: What the file states, or None if it states nothing: times may be since 1970 by themselves.
        at_us: A time in the file, or None if it has none.
    """
    since_ns = base_ns or 0
    return since_ns if is_wall(since_ns + round((at_us or 0.0) * 1000)) else None


def middle(times: Iterable[float]) -> float | None:
    """Return a time that few wrong ones cannot move: the upper median, because
    a wrong time is more often 0 than in the future. None without any time."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2] if ordered else None


def is_near(start_ns: int, end_ns: int, window: tuple[int, int]) -> bool:
    """Return whether something lies in the step, or at most an hour away from it."""
    return window[0] - MARGIN_NS <= start_ns and end_ns <= window[1] + MARGIN_NS


class Hours:
    """The hours in which the events of one file began, to find the ones far from all others."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def add(self, starts_us: Iterable[float]) -> None:
        self._counts.update(int(start // MARGIN_US) for start in starts_us)

    def near(self) -> tuple[float, float]:
        """Return the first and the last believed time in us: those of the consecutive hours with the most
        events, and an hour on each side.
        """
        runs: list[list[int]] = []
        for hour in sorted(self._counts):
            if runs and hour - runs[-1][-1] <= 1:
                runs[-1].append(hour)
            else:
                runs.append([hour])
        most = max(runs, key=lambda run: sum(map(self._counts.__getitem__, run)), default=[0])
        return (most[0] - 1) * MARGIN_US, (most[-1] + 2) * MARGIN_US
