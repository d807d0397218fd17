"""Reading this process' clocks, and estimating how far another process' clock is off."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.files.clock import ClockAnchor

_HAS_RAW = hasattr(time, "CLOCK_MONOTONIC_RAW")


def read_anchor(tries: int = 5) -> ClockAnchor:
    """All clocks at one moment: the tightest of `tries` readings (a preempted one is wide and loses)."""
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
    def offset_ns(self) -> int:
        return ((self.heard_ns - self.sent_ns) + (self.answered_ns - self.received_ns)) // 2


def estimate_offset(exchanges: Iterable[Exchange]) -> tuple[int, int] | None:
    """(offset, uncertainty) in ns of their clock against ours: theirs = ours + offset, right within +-
    uncertainty.

    Takes the exchange with the shortest round trip: the path can hide an asymmetry of at most half of it (RFC
    5905). None without exchanges, or when every one was spoiled by a clock that was set back meanwhile.
    """
    usable = [exchange for exchange in exchanges if exchange.round_trip_ns >= 0]
    if not usable:
        return None
    best = min(usable, key=lambda exchange: exchange.round_trip_ns)
    return best.offset_ns, (best.round_trip_ns + 1) // 2
