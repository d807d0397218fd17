"""Straight lines that fit the known bounds of the offset between two clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WANDER_PPM = (0, 1, 15)
"""Deviations from a steady drift that are tried in turn, in ppm of the step's length, up to PHI of RFC
5905."""
REACH_NS = 3_600_000_000_000
"""Largest error of a sample, or of the first collective."""
_ROUNDING_NS = 1.0
"""Times are whole ns, so a bound can be off by one."""
_Corner = tuple[float, float]


class Line(NamedTuple):
    """Lead of a wall clock over another: it changes steadily between two times of that clock."""

    first_ns: int
    last_ns: int
    first_offset_ns: int
    last_offset_ns: int

    def at(self, wall_ns: int) -> int:
        change_ns = self.last_offset_ns - self.first_offset_ns
        lasted_ns = max(self.last_ns - self.first_ns, 1)
        return self.first_offset_ns + (wall_ns - self.first_ns) * change_ns // lasted_ns

    def inverse(self, first_ns: int, last_ns: int) -> Line:
        """Return the lead of the other clock over this one, by times that the other shows."""
        return Line(first_ns, last_ns, -self._of_other(first_ns), -self._of_other(last_ns))

    def then(self, other: Line) -> Line:
        """Return the first clock's lead over a third one, given the second clock's lead over the third."""
        first, last = (at - offset for at, offset in zip(self[:2], self[2:], strict=True))
        return self._replace(
            first_offset_ns=self.first_offset_ns + other.at(first),
            last_offset_ns=self.last_offset_ns + other.at(last),
        )

    def _of_other(self, other_ns: int) -> int:
        wall_ns = other_ns
        for _ in range(4):  # each time 2,000 times more exact
            wall_ns = other_ns + self.at(wall_ns)
        return self.at(wall_ns)


class Sample(NamedTuple):
    """Lead of a clock over the owner's when it showed `wall_ns`, true within +- `within_ns`."""

    wall_ns: int
    offset_ns: int
    within_ns: int


class Fit(NamedTuple):
    """Middle of a band, ns, at its two ends. The true line is always within +- `within_ns` of it."""

    first_ns: int
    last_ns: int
    within_ns: int


class Band:
    """The (value at 0, value at 1) of every line that fits all bounds so far: a convex polygon.

    Whatever the number of bounds, only its corners are kept. Values are ns, no farther from 0 than doubles
    are exact to a fraction of a ns: hours.
    """

    def __init__(self, reach_ns: float, change_ns: float) -> None:
        """Start with all lines within `reach_ns` of 0 that change by at most `change_ns` from 0 to 1."""
        self._corners: list[_Corner] = [
            (-reach_ns, -reach_ns), (reach_ns, -reach_ns), (reach_ns, reach_ns), (-reach_ns, reach_ns),
        ]  # fmt: skip
        self._keep(1, -1, change_ns)
        self._keep(-1, 1, change_ns)

    def __bool__(self) -> bool:
        """Return whether any line is left."""
        return bool(self._corners)

    def copy(self) -> Band:
        made = Band.__new__(Band)
        made._corners = list(self._corners)
        return made

    def cut(self, at: float, low_ns: float, high_ns: float) -> None:
        """Keep the lines whose value at `at` is between the two bounds."""
        self._keep(1 - at, at, _ROUNDING_NS - low_ns)
        self._keep(at - 1, -at, _ROUNDING_NS + high_ns)

    def fit(self) -> Fit:
        """Return the middle line. The band must not be empty."""
        firsts, lasts = zip(*self._corners, strict=True)
        halves = [(max(values) - min(values)) / 2 for values in (firsts, lasts)]
        return Fit(
            round((max(firsts) + min(firsts)) / 2),
            round((max(lasts) + min(lasts)) / 2),
            round(max(halves)) + 1,
        )

    def _keep(self, by_first: float, by_last: float, least: float) -> None:
        """Keep lines with `by_first * first + by_last * last + least` of at least 0 (Sutherland-Hodgman)."""
        corners = self._corners
        above = [by_first * first + by_last * last + least for first, last in corners]
        if not above or min(above) >= 0:
            return
        kept: list[_Corner] = []
        for corner, following, high, next_high in zip(
            corners, corners[1:] + corners[:1], above, above[1:] + above[:1], strict=True
        ):
            if high >= 0:
                kept.append(corner)
            if (high >= 0) != (next_high >= 0):
                share = high / (high - next_high)
                kept.append(
                    (
                        corner[0] + share * (following[0] - corner[0]),
                        corner[1] + share * (following[1] - corner[1]),
                    )
                )
        self._corners = kept


def fitted(
    samples: Sequence[Sample], first_ns: int, last_ns: int, change_ns: float
) -> tuple[Line, int] | None:
    """Return the middle line of those that fit the samples, and the largest distance of the true one in ns.

    None if no line fits.

    Args:
        first_ns: First and last time of the line, on the clock of the samples.
        change_ns: Largest change of the offset between these.
    """
    lasted_ns, near_ns = max(last_ns - first_ns, 1), samples[0].offset_ns
    for ppm in WANDER_PPM:
        slack_ns = lasted_ns * ppm // 1_000_000
        band = Band(REACH_NS, change_ns)
        for at_ns, offset_ns, within_ns in samples:
            apart_ns, known_ns = offset_ns - near_ns, within_ns + slack_ns
            band.cut((at_ns - first_ns) / lasted_ns, apart_ns - known_ns, apart_ns + known_ns)
        if band:
            fit = band.fit()
            line = Line(first_ns, last_ns, near_ns + fit.first_ns, near_ns + fit.last_ns)
            return line, fit.within_ns + slack_ns
    return None
