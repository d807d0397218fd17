"""Reading this process' clocks, and estimating how far another process' clock is off."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.files.clock import DRIFT_PPM, ClockAnchor

_HAS_RAW = hasattr(time, "CLOCK_MONOTONIC_RAW")


def read_anchor(tries: int = 5) -> ClockAnchor:
    """Read all clocks at one moment. Return the tightest of `tries` readings: a preempted one is wide."""
    return min((_read_once() for _ in range(tries)), key=lambda anchor: anchor.uncertainty_ns)


def _read_once() -> ClockAnchor:
    before = time.monotonic_ns()
    wall = time.time_ns()
    raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) if _HAS_RAW else None
    after = time.monotonic_ns()
    return ClockAnchor(
        wall_ns=wall, mono_ns=(before + after) // 2, raw_ns=raw, uncertainty_ns=(after - before + 1) // 2
    )


class Exchange(NamedTuple):
    """One request and response, stamped with the wall clocks of both sides, in unix ns (as in NTP)."""

    sent_ns: int
    """Our clock, before the request left."""
    heard_ns: int
    """Their clock, when the request arrived."""
    answered_ns: int
    """Their clock, when the response left."""
    received_ns: int
    """Our clock, when the response arrived."""

    @property
    def round_trip_ns(self) -> int:
        return (self.received_ns - self.sent_ns) - (self.answered_ns - self.heard_ns)

    @property
    def within_ns(self) -> int:
        """Half the time on the way. Their clock measured their part of it, and may have drifted meanwhile."""
        drifted_ns = abs(self.answered_ns - self.heard_ns) * DRIFT_PPM // 1_000_000
        return (self.round_trip_ns + drifted_ns + 1) // 2

    @property
    def offset_ns(self) -> int:
        return ((self.heard_ns - self.sent_ns) + (self.answered_ns - self.received_ns)) // 2


class Estimate(NamedTuple):
    """Their clock against ours: theirs = ours + `offset_ns`, right within +- `within_ns` at `at_ns`."""

    offset_ns: int
    within_ns: int
    at_ns: int
    """Our clock, in unix ns."""


def estimate_offset(exchanges: Iterable[Exchange]) -> Estimate | None:
    """Return the offset of their clock by the best exchange.

    Half of the time on the way is the most that a path can hide by being slower in one direction (RFC 5905).
    None without exchanges, or if each was spoiled by a clock that was set back meanwhile.
    """
    usable = [exchange for exchange in exchanges if exchange.within_ns >= 0]
    if not usable:
        return None
    best = min(usable, key=lambda exchange: exchange.within_ns)
    return Estimate(best.offset_ns, best.within_ns, (best.sent_ns + best.received_ns) // 2)
