"""Set of all straight lines that fit the known bounds of the offset between two clocks."""

from __future__ import annotations

from typing import NamedTuple

_ROUNDING_NS = 1.0
"""Times are whole ns, so a bound can be off by one."""
_Corner = tuple[float, float]


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

    def holds(self, first_ns: float, last_ns: float) -> bool:
        """Return whether this line is one of those left."""
        band = self.copy()
        band.cut(0, first_ns, first_ns)
        band.cut(1, last_ns, last_ns)
        return bool(band)

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
