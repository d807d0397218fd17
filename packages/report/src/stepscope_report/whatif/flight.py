"""The requests in flight at replicas, as columns: sums over all calls cost the same for any number in flight.

Each generation is two events on one axis, its begin and its end. The replicas lie on it one behind the other.
In the gap from one event to the next, as many requests are in flight at the replica. What a call is served is
the difference of a running sum at its two events. The columns are gathered and added in C.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter, mul, neg, sub
from typing import Any

from stepscope_report.whatif.model import Call

_SINGLE = 4
"""Up to so many requests, each number has a rate of its own."""
_WIDTH = 1.5
"""Above, a bin ends at so many times its begin."""


def edges(most: int) -> list[int]:
    """Return the largest number of requests of each bin, up to `most`."""
    bounds = list(range(1, min(most, _SINGLE) + 1))
    while bounds[-1] < most:
        bounds.append(max(bounds[-1] + 1, round(bounds[-1] * _WIDTH)))
    return bounds


class Flight:
    """Generations of a step and the number of requests in flight beside them, in bins."""

    def __init__(self, calls: Sequence[Call], slots: int | None = None) -> None:
        """Lay the calls out.

        Args:
            slots: Requests that a replica serves at once: those that wait in front of it are not in flight.
                None if all are in flight.
        """
        self.tokens = [call.tokens or 0 for call in calls]
        """The tokens of each call; 0 if no span states them."""
        self.replicas = [call.replica or 0 for call in calls]
        begins = (call.start_ns + (call.wait_ns if slots else 0) for call in calls)
        times = [*begins, *(call.end_ns for call in calls)]
        replicas = self.replicas * 2
        order = sorted(range(len(times)), key=lambda event: (replicas[event], times[event]))
        places = [0] * len(order)
        for place, event in enumerate(order):
            places[event] = place
        self._signed = _taking(order)
        self._starts, self._ends = _taking(places[: len(calls)]), _taking(places[len(calls) :])
        counts = accumulate(1 if event < len(calls) else -1 for event in order)
        self._counts = [min(count, slots or count) for count in counts]
        """Requests in flight behind each event."""
        ns = [times[after] - times[before] for before, after in pairwise(order)]
        self._gaps_ns = [float(gap) if count else 0.0 for gap, count in zip(ns, self._counts, strict=False)]
        self._gaps_ns.append(0.0)
        bounds = edges(max(self._counts))
        bins = [bisect_left(bounds, count) for count in self._counts]
        self._gap_rates = _taking(bins)
        of_bins: list[list[int]] = [[] for _ in bounds]
        for place, bin_ in enumerate(bins):
            of_bins[bin_].append(place)
        self._of_bins = [_taking(gaps) for gaps in of_bins]
        self.means = self._means(bounds)
        """The mean number of requests in each bin."""

    def _means(self, bounds: Sequence[int]) -> list[float]:
        weighted = list(map(mul, self._gaps_ns, self._counts))
        sums = [(sum(of_bin(weighted)), sum(of_bin(self._gaps_ns))) for of_bin in self._of_bins]
        return [total / ns if ns else float(bound) for bound, (total, ns) in zip(bounds, sums, strict=True)]

    def served(self, rates: Sequence[float]) -> list[float]:
        """Return the tokens of each call, if a request in a bin gets so many per ns."""
        return self._served(self._gap_rates(rates))

    def served_by(self, rate: Callable[[int], float]) -> list[float]:
        """Return the tokens of each call, if one of so many requests gets so many per ns."""
        rates = {count: rate(count) if count else 0.0 for count in set(self._counts)}
        return self._served(_taking(self._counts)(rates))

    def _served(self, gap_rates: Sequence[float]) -> list[float]:
        clock = list(accumulate(map(mul, self._gaps_ns, gap_rates), initial=0.0))
        return list(map(sub, self._ends(clock), self._starts(clock)))

    def by_bin(self, factors: Sequence[float]) -> list[float]:
        """Return for each bin the sum over all calls of a factor, times the ns of the call in the bin."""
        present = accumulate(self._signed([*factors, *map(neg, factors)]))
        weighted = list(map(mul, self._gaps_ns, present))
        return [sum(of_bin(weighted)) for of_bin in self._of_bins]


def _taking(indices: Sequence[int]) -> Callable[[Any], Sequence[float]]:
    """Return a function that takes these items of a sequence or mapping."""
    if len(indices) < 2:
        return lambda values: tuple(values[index] for index in indices)
    return itemgetter(*indices)
