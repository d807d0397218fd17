"""Clock anchors and offsets as they lie on disk. All values are integer nanoseconds."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""What is read back as an integer: beyond, it is none that we wrote, nor one that a clock or a page holds."""

DRIFT_PPM = 200
"""The largest assumed drift between the wall clocks of two hosts: two oscillators, each within 100
ppm of its nominal rate, as data sheets say. A clock that is slewed faster than that is outside the model.
"""


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One simultaneous reading of a process' clocks; turns its monotonic times into wall-clock times.

    wall = mono - mono_ns + wall_ns, right within `uncertainty_ns` (half the time the reading took).
    """

    wall_ns: Int
    """CLOCK_REALTIME, unix ns."""
    mono_ns: Int
    """CLOCK_MONOTONIC, ns; what spans are timed with."""
    raw_ns: Int | None = None
    """CLOCK_MONOTONIC_RAW, ns; what some device profilers count in. None where the system has none."""
    uncertainty_ns: Int = 0


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """How far another process' wall clock is ahead of the capture owner's: owner_time = its_time -
    offset_ns.
    """

    process: str
    """`ProcessInfo.key` of the other process."""
    offset_ns: Int
    uncertainty_ns: Int
    """Half the round trip of the best exchange: the true offset lies within +- this, at that moment."""
    at_mono_ns: Int
    """The middle of that exchange, on the owner's monotonic clock."""
