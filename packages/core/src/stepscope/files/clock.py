"""Readings of clocks, and offsets between the clocks of processes.

All values are integer nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

MOST = 1 << 62
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
"""An integer in a file. Values beyond these bounds are invalid; clocks never reach them."""

DRIFT_PPM = 200
"""The largest assumed drift between the wall clocks of two hosts. Data sheets allow each oscillator to
deviate by 100 ppm. A clock that is slewed faster is not modelled."""


_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def duration(ns: int | None) -> str:
    """Return three digits and a unit: `1.23 s`, `456 ms`, `5 ns`, `0`; or `-` for None."""
    if ns is None:
        return "-"
    for size, unit in _UNITS:
        value = abs(ns) / size
        if value >= 0.9995:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{ns / size:.{digits}f} {unit}"
    return f"{ns} ns" if ns else "0"


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One simultaneous reading of a process' clocks, which converts its monotonic times to wall-clock times.

    wall = mono - mono_ns + wall_ns, with an error of at most `uncertainty_ns` (half the duration of the
    reading).
    """

    wall_ns: Int
    """CLOCK_REALTIME in unix ns."""
    mono_ns: Int
    """CLOCK_MONOTONIC in ns, which spans use."""
    raw_ns: Int | None = None
    """CLOCK_MONOTONIC_RAW in ns, which some device profilers use; None if the system does not have this
    clock."""
    uncertainty_ns: Int = 0


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Offset of another process' wall clock: owner_time = its_time - offset_ns. The owner opens captures."""

    process: str
    """`ProcessInfo.key` of the other process."""
    offset_ns: Int
    """Lead of the other process' wall clock over the owner's, in ns."""
    uncertainty_ns: Int
    """Largest error of the offset, half the round trip of the best exchange."""
    at_mono_ns: Int
    """Middle of the best exchange, in ns of the owner's monotonic clock."""


class Exchange(NamedTuple):
    """Times of one request and its response, in unix ns by the wall clocks of both sides (as in NTP)."""

    sent_ns: int
    """Time when the request was sent, on the clock of this process."""
    heard_ns: int
    """Time when the request arrived, on the other clock."""
    answered_ns: int
    """Time when the response was sent, on the other clock."""
    received_ns: int
    """Time when the response arrived, on the clock of this process."""

    @property
    def round_trip_ns(self) -> int:
        return (self.received_ns - self.sent_ns) - (self.answered_ns - self.heard_ns)

    @property
    def within_ns(self) -> int:
        """Largest error of the offset: half of the time in transit, plus half of the other clock's drift
        between arrival and response.
        """
        drifted_ns = abs(self.answered_ns - self.heard_ns) * DRIFT_PPM // 1_000_000
        return (self.round_trip_ns + drifted_ns + 1) // 2

    @property
    def offset_ns(self) -> int:
        return ((self.heard_ns - self.sent_ns) + (self.answered_ns - self.received_ns)) // 2


class Estimate(NamedTuple):
    """The offset of another wall clock: other time = own time + `offset_ns`, +- `within_ns`."""

    offset_ns: int
    within_ns: int
    at_ns: int
    """Time of the measurement in unix ns, on the clock of this process."""


def estimate_offset(exchanges: Iterable[Exchange]) -> Estimate | None:
    """Return the offset of the other clock, from the exchange with the smallest `within_ns`.

    If messages take longer in one direction, the offset is wrong by at most half of the time in transit (RFC
    5905). Return None if there is no exchange, or if a clock was set back during every exchange.
    """
    usable = [exchange for exchange in exchanges if exchange.within_ns >= 0]
    if not usable:
        return None
    best = min(usable, key=lambda exchange: exchange.within_ns)
    return Estimate(best.offset_ns, best.within_ns, (best.sent_ns + best.received_ns) // 2)


_HAS_RAW = hasattr(time, "CLOCK_MONOTONIC_RAW")


def read_anchor(tries: int = 5) -> ClockAnchor:
    """Read all clocks `tries` times, and return the fastest reading."""
    readings = list[tuple[int, int, int, int | None]]()
    for _ in range(tries):
        before = time.monotonic_ns()
        wall = time.time_ns()
        raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) if _HAS_RAW else None
        after = time.monotonic_ns()
        readings.append((after - before, before, wall, raw))
    took, before, wall, raw = min(readings)
    return ClockAnchor(wall_ns=wall, mono_ns=before + took // 2, raw_ns=raw, uncertainty_ns=(took + 1) // 2)
