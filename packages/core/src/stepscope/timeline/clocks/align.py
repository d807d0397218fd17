"""From one process' monotonic clock to the wall clock of the capture's owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.timeline.model import ProcessClock

_JUMP_NS = 1_000_000
_JUMP_PPM = 1000
"""A wall clock that gains more than both on the monotonic one was set: kernels slew by at most 500 ppm."""
_WANDER_PPM = 15
"""How fast an offset is taken to grow uncertain after it was measured (PHI of RFC 5905)."""


class Placement:
    """Monotonic ns of one process -> unix ns. Linear between two knots, at the clock's own pace beyond."""

    def __init__(self, knots: Sequence[tuple[int, int]]) -> None:
        self._first, self._last = knots[0], knots[-1]
        self._mono_ns = self._last[0] - self._first[0]
        self._wall_ns = self._last[1] - self._first[1]

    def __call__(self, mono_ns: int) -> int:
        since = mono_ns - self._first[0]
        if since <= 0 or self._mono_ns <= 0:
            return self._first[1] + since
        if since >= self._mono_ns:
            return self._last[1] + since - self._mono_ns
        return self._first[1] + since * self._wall_ns // self._mono_ns


class Reference(NamedTuple):
    """What a step's processes are aligned to."""

    host: str
    place: Placement | None
    """The owner's placement; None when the owner left no anchor."""
    uncertainty_ns: int
    offsets: Sequence[ClockOffset]


class Aligned(NamedTuple):
    place: Placement
    clock: ProcessClock


def align_owner(opened: ClockAnchor, closed: ClockAnchor | None) -> Aligned:
    """The owner's own placement: by its anchors."""
    knots, drift_ns, jumped = _knots(opened, closed)
    uncertainty_ns = opened.uncertainty_ns + abs(drift_ns) * jumped
    clock = ProcessClock(alignment="owner", uncertainty_ns=uncertainty_ns, drift_ns=drift_ns, jumped=jumped)
    return Aligned(Placement(knots), clock)


def align(
    key: str, host: str, opened: ClockAnchor, closed: ClockAnchor | None, reference: Reference
) -> Aligned:
    """Another process' placement: by its anchors and by what the owner measured of its clock.

    On the owner's host the offset is 0: a measured one is the noise of the exchange, unless it rules 0 out
    (two machines of one name). On another host each knot is moved by the offset most certain there.
    """
    knots, drift_ns, jumped = _knots(opened, closed)
    offsets = sampled(key, reference)
    same_host = host == reference.host
    if same_host and all(abs(offset.offset_ns) <= offset.uncertainty_ns for offset in offsets.values()):
        offsets = {}
    moved = [_offset_at(wall_ns, offsets) for _, wall_ns in knots]
    known_ns = opened.uncertainty_ns + reference.uncertainty_ns + max(within_ns for _, within_ns in moved)
    if closed is None:  # its positions follow its own pace from its opening on
        known_ns += max((abs(offset.offset_ns - moved[0][0]) for offset in offsets.values()), default=0)
    clock = ProcessClock(
        alignment="measured" if offsets else "same host" if same_host else "unaligned",
        offset_ns=moved[0][0],
        closing_offset_ns=moved[-1][0],
        uncertainty_ns=known_ns + abs(drift_ns) * jumped if same_host or offsets else None,
        drift_ns=drift_ns,
        jumped=jumped,
        drift_ppm=_ppm(knots, moved[-1][0] - moved[0][0]) if len(offsets) > 1 else None,
    )
    return Aligned(_moved(knots, [offset_ns for offset_ns, _ in moved]), clock)


def align_at(
    opened: ClockAnchor,
    closed: ClockAnchor | None,
    opening_ns: int,
    closing_ns: int,
    known_ns: int,
    matched: int,
) -> Aligned:
    """A placement by what `matched` collectives say: the offsets at both ends, right within +- `known_ns`."""
    knots, drift_ns, jumped = _knots(opened, closed)
    clock = ProcessClock(
        alignment="collectives",
        offset_ns=opening_ns,
        closing_offset_ns=closing_ns if len(knots) > 1 else opening_ns,
        uncertainty_ns=known_ns,
        drift_ns=drift_ns,
        jumped=jumped,
        drift_ppm=_ppm(knots, closing_ns - opening_ns),
        matched=matched,
    )
    return Aligned(_moved(knots, [opening_ns, closing_ns]), clock)


def _ppm(knots: Sequence[tuple[int, int]], gained_ns: int) -> float | None:
    lasted_ns = knots[-1][1] - knots[0][1]
    return None if lasted_ns <= 0 else round(gained_ns / lasted_ns * 1_000_000, 3)


def _moved(knots: Sequence[tuple[int, int]], offsets_ns: Sequence[int]) -> Placement:
    return Placement([(mono, wall - offset) for (mono, wall), offset in zip(knots, offsets_ns, strict=False)])


def _knots(opened: ClockAnchor, closed: ClockAnchor | None) -> tuple[list[tuple[int, int]], int, bool]:
    """(knots on the process' own wall clock, its drift, whether it was set meanwhile)."""
    knots = [(opened.mono_ns, opened.wall_ns)]
    if closed is None or closed.mono_ns <= opened.mono_ns:
        return knots, 0, False
    mono_ns = closed.mono_ns - opened.mono_ns
    drift_ns = closed.wall_ns - opened.wall_ns - mono_ns
    jumped = abs(drift_ns) > max(_JUMP_NS, mono_ns * _JUMP_PPM // 1_000_000)
    if not jumped:
        knots.append((closed.mono_ns, closed.wall_ns))
    return knots, drift_ns, jumped


def sampled(key: str, reference: Reference) -> dict[int, ClockOffset]:
    """What was measured of a process' clock, by the time that it showed then."""
    place = reference.place
    if place is None:
        return {}
    mine = (offset for offset in reference.offsets if offset.process == key)
    return {place(offset.at_mono_ns) + offset.offset_ns: offset for offset in mine}


def _offset_at(wall_ns: int, offsets: Mapping[int, ClockOffset]) -> tuple[int, int]:
    """(offset, uncertainty) at one time of the other's wall clock, by the measurement that knows most."""
    gained_ns, within_ns, during_ns = _gain(offsets)
    known = []
    for at_ns, offset in offsets.items():
        age_ns = wall_ns - at_ns
        uncertainty_ns = aged(offset.uncertainty_ns, age_ns) + abs(age_ns) * within_ns // during_ns
        known.append((uncertainty_ns, offset.offset_ns + age_ns * gained_ns // during_ns))
    uncertainty_ns, offset_ns = min(known, default=(0, 0))
    return offset_ns, uncertainty_ns


def _gain(offsets: Mapping[int, ClockOffset]) -> tuple[int, int, int]:
    """How much the first and the last measurement say that it gains, within what, during how long.

    Nothing, unless they say for certain that it is more than a clock is taken to wander anyway.
    """
    if len(offsets) < 2:
        return 0, 0, 1
    first, last = min(offsets), max(offsets)
    gained_ns = offsets[last].offset_ns - offsets[first].offset_ns
    within_ns = offsets[last].uncertainty_ns + offsets[first].uncertainty_ns
    if abs(gained_ns) <= aged(within_ns, last - first):
        return 0, 0, 1
    return gained_ns, within_ns, last - first


def aged(uncertainty_ns: int, age_ns: int) -> int:
    """The uncertainty of an offset that long before, or after, it was measured."""
    return uncertainty_ns + abs(age_ns) * _WANDER_PPM // 1_000_000
