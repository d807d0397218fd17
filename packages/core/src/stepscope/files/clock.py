"""Clock anchors and offsets on disk, the reading of an anchor, and the estimate of an offset.

All values are integer nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

MOST = 1 << 62
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
"""An integer as it is read back. stepscope writes none beyond these bounds, and no clock reaches them."""

DRIFT_PPM = 200
"""The largest assumed drift between the wall clocks of two hosts. Data sheets allow each oscillator 100 ppm
from its nominal rate. A clock that is slewed faster is outside of the model.
"""


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One simultaneous reading of a process' clocks; turns its monotonic times into wall-clock times.

    wall = mono - mono_ns + wall_ns, correct within `uncertainty_ns` (half the duration of the reading).
    """

    wall_ns: Int
    """CLOCK_REALTIME, unix ns."""
    mono_ns: Int
    """CLOCK_MONOTONIC, ns; the clock of spans."""
    raw_ns: Int | None = None
    """CLOCK_MONOTONIC_RAW, ns; the clock of some device profilers. None if the system has none."""
    uncertainty_ns: Int = 0


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The lead of another process' wall clock over the owner's: owner_time = its_time - offset_ns."""

    process: str
    """`ProcessInfo.key` of the other process."""
    offset_ns: Int
    uncertainty_ns: Int
    """Half the round trip of the best exchange: the largest error (+-) of the offset at that moment."""
    at_mono_ns: Int
    """Middle of the best exchange, on the owner's monotonic clock."""


class Exchange(NamedTuple):
    """One request and response, stamped with the wall clocks of both sides, in unix ns (as in NTP)."""

    sent_ns: int
    """Time on our clock before the request left."""
    heard_ns: int
    """Time on their clock when the request arrived."""
    answered_ns: int
    """Time on their clock when the response left."""
    received_ns: int
    """Time on our clock when the response arrived."""

    @property
    def round_trip_ns(self) -> int:
        return (self.received_ns - self.sent_ns) - (self.answered_ns - self.heard_ns)

    @property
    def within_ns(self) -> int:
        """Largest error of the offset in ns: half of the time on the way, with the drift of their clock while
        they answered.
        """
        drifted_ns = abs(self.answered_ns - self.heard_ns) * DRIFT_PPM // 1_000_000
        return (self.round_trip_ns + drifted_ns + 1) // 2

    @property
    def offset_ns(self) -> int:
        return ((self.heard_ns - self.sent_ns) + (self.answered_ns - self.received_ns)) // 2


class Estimate(NamedTuple):
    """The lead of the other side's wall clock: its time = our time + `offset_ns`, +- `within_ns`."""

    offset_ns: int
    within_ns: int
    at_ns: int
    """Time of the measurement on our clock, in unix ns."""


def estimate_offset(exchanges: Iterable[Exchange]) -> Estimate | None:
    """Return the offset of the other side's clock, from the exchange with the smallest `within_ns`.

    A message that is slower in one direction shifts the offset by at most half of the time on the
    way (RFC 5905).
    Return None if there is no exchange, or if a clock was set back during each exchange.
    """
    usable = [exchange for exchange in exchanges if exchange.within_ns >= 0]
    if not usable:
        return None
    best = min(usable, key=lambda exchange: exchange.within_ns)
    return Estimate(best.offset_ns, best.within_ns, (best.sent_ns + best.received_ns) // 2)


_HAS_RAW = hasattr(time, "CLOCK_MONOTONIC_RAW")


def read_anchor(tries: int = 5) -> ClockAnchor:
    """Read all clocks `tries` times, and return the reading that took least time."""
    readings = list[tuple[int, int, int, int | None]]()
    for _ in range(tries):
        before = time.monotonic_ns()
        wall = time.time_ns()
        raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) if _HAS_RAW else None
        after = time.monotonic_ns()
        readings.append((after - before, before, wall, raw))
    took, before, wall, raw = min(readings)
    return ClockAnchor(wall_ns=wall, mono_ns=before + took // 2, raw_ns=raw, uncertainty_ns=(took + 1) // 2)
