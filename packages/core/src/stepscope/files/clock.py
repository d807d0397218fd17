"""Clock anchors and offsets on disk. All values are integer nanoseconds."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""An integer that is read back. stepscope writes none beyond these bounds, and no clock reaches them."""

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
    """Half the round trip of the best exchange: at that moment the true offset lies within +- this."""
    at_mono_ns: Int
    """The middle of that exchange, on the owner's monotonic clock."""
