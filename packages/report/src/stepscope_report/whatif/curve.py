"""The service curve of replicas: tokens per second by the number of requests in flight, fitted to a step.

The model: a replica with n requests in flight generates tokens for each of them at the same rate r(n). A
request that spent the time T(n) with n requests in flight therefore has w = sum over n of T(n) r(n) tokens.
The fit finds the rates of maximum likelihood, for tokens that arrive at random, by the iteration of
Richardson and Lucy, which keeps the rates positive.

The rates are ordered: with more requests in flight, the tokens per second of a replica do not fall, and those
of one request do not rise. Without this order, rates are far off for numbers of requests that are rare.

Requests that wait inside the engine are in flight too, so that the limit of an engine is a flat part of the
curve. If spans show the queue, only requests that are being served are in flight.

Between measured numbers of requests, the replica's tokens per second are interpolated. Below the smallest
measured number, a request has the rate of that number. Above the largest, the replica's tokens per second
stay constant. These values are lower bounds. `Curve.beyond` raises them, at most to values that continue the
curve's slope.

If engines recorded their forward passes, the curve is measured from the passes instead (`measured`).

`Flight` keeps the requests in flight as columns. Each generation is two events, its start and its end. The
tokens that a generation was served are the difference of a running sum at its two events.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter, mul, neg, sub, truediv
from typing import Any, NamedTuple

import msgspec

from stepscope_report.timeline.model import EnginePasses
from stepscope_report.whatif import Call

_SINGLE = 4
"""Up to this number of requests, each number has a bin of its own."""
_WIDTH = 1.5
"""A bin of more than `_SINGLE` requests ends at its start times this factor."""


def edges(most: int) -> list[int]:
    """Return the largest number of requests of each bin, for bins up to `most` requests."""
    bounds = list(range(1, min(most, _SINGLE) + 1))
    while bounds[-1] < most:
        bounds.append(max(bounds[-1] + 1, round(bounds[-1] * _WIDTH)))
    return bounds


class Flight:
    """The generations of a step, with the number of requests in flight at each time, in bins."""

    def __init__(self, calls: Sequence[Call], slots: int | None = None) -> None:
        """Put the starts and ends of the generations in order.

        Args:
            calls: The generations of the step.
            slots: Number of requests that a replica serves at once. Further requests wait and are not in
                flight. None for no limit.
        """
        self.tokens = [call.tokens or 0 for call in calls]
        """Tokens of each generation, or 0 if unknown."""
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
        """Number of requests in flight after each event."""
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
        """Mean number of requests in each bin."""

    def _means(self, bounds: Sequence[int]) -> list[float]:
        weighted = list(map(mul, self._gaps_ns, self._counts))
        sums = [(sum(of_bin(weighted)), sum(of_bin(self._gaps_ns))) for of_bin in self._of_bins]
        return [total / ns if ns else float(bound) for bound, (total, ns) in zip(bounds, sums, strict=True)]

    def served(self, rates: Sequence[float]) -> list[float]:
        """Return the tokens that each generation would be served.

        Args:
            rates: Tokens per ns of one request, for each bin.
        """
        return self._served(self._gap_rates(rates))

    def served_by(self, rate: Callable[[int], float]) -> list[float]:
        """Return the tokens that each generation would be served.

        Args:
            rate: Returns the tokens per ns of one request, for a number of requests in flight.
        """
        rates = {count: rate(count) if count else 0.0 for count in set(self._counts)}
        return self._served(_taking(self._counts)(rates))

    def _served(self, gap_rates: Sequence[float]) -> list[float]:
        clock = list(accumulate(map(mul, self._gaps_ns, gap_rates), initial=0.0))
        return list(map(sub, self._ends(clock), self._starts(clock)))

    def by_bin(self, factors: Sequence[float]) -> list[float]:
        """Return for each bin the sum over all generations of (factor of the generation * its ns
        in the bin).
        """
        present = accumulate(self._signed([*factors, *map(neg, factors)]))
        weighted = list(map(mul, self._gaps_ns, present))
        return [sum(of_bin(weighted)) for of_bin in self._of_bins]


def _taking(indices: Sequence[int]) -> Callable[[Any], Sequence[float]]:
    """Return a function that takes the items at `indices` of a sequence or mapping."""
    if len(indices) < 2:
        return lambda values: tuple(values[index] for index in indices)
    return itemgetter(*indices)


_CYCLES = 15
"""Largest number of cycles of the fit. A cycle has three iterations."""
_LONGEST = 30.0
"""Largest number of iterations that one extrapolation may replace."""
_FARTHEST = 10.0
"""Largest change of the logarithm of a rate in one extrapolation."""
_SETTLED = 1e-4
"""The fit ends if one iteration changes every rate by less than this share."""
_LEAST = 1e-6
"""Lowest rate as a share of the highest rate. It is above 0 so that each request ends."""
_ENOUGH = 5
"""Number of generations with known tokens from which a replica gets a speed of its own."""
_ROUNDING = 1e-12
"""Lower bound of a generation's tokens, as a share of all tokens. Rounding of the running sums could
otherwise make the tokens of a generation zero or negative."""


class Curve(msgspec.Struct, frozen=True):
    """Tokens per ns of a replica by its number of requests in flight."""

    points: tuple[tuple[float, float], ...]
    """(number of requests, tokens per ns of all these requests together), ascending."""
    larger: tuple[tuple[float, float], ...] = ()
    """Points for more requests than were measured, computed by a model."""
    beyond: float = 0.0
    """Position of the curve outside of its points, between 0 (fewest tokens per ns that the points allow) and
    1 (most)."""

    def rate(self, requests: float) -> float:
        """Return the tokens per ns of one request if `requests` are in flight."""
        return self._total(requests) / requests

    def _total(self, requests: float) -> float:
        points = self.points + self.larger
        place = bisect_left(points, (requests, 0.0))
        if place == len(points):
            most, total = points[-1]
            slope = _slope(points[-2:], alone=1.0)
            return total * math.pow(requests / most, self.beyond * slope)
        above, total = points[place]
        if place == 0:
            slope = _slope(points[:2], alone=0.0)
            return total * math.pow(requests / above, 1 - self.beyond * (1 - slope))
        below, least = points[place - 1]
        return least + (total - least) * (requests - below) / (above - below)


def _slope(points: Sequence[tuple[float, float]], alone: float) -> float:
    """Return the slope of log(tokens per ns) over log(requests): 0 if the replica is full, 1 if requests do
    not slow each other down.

    Args:
        alone: The slope to return for a single point.
    """
    if len(points) < 2:
        return alone
    (fewer, little), (more, much) = points
    return math.log(much / little) / math.log(more / fewer)


def fit(flight: Flight, weights: Sequence[int] | None = None, near: Curve | None = None) -> Curve:
    """Return the curve that fits the generations whose tokens are known.

    Args:
        weights: Number of times that each generation counts. None to count each once.
        near: A similar curve to start from, which makes the fit faster. None to start from a flat rate.
    """
    counts = weights or [1] * len(flight.tokens)
    written = [float(tokens * count) for tokens, count in zip(flight.tokens, counts, strict=True)]
    spent = flight.by_bin(
        [float(count) if tokens else 0.0 for tokens, count in zip(flight.tokens, counts, strict=True)]
    )
    mean = sum(written) / sum(spent)
    begin = [near.rate(requests) if near else mean for requests in flight.means]
    rates = [rate if ns else 0.0 for rate, ns in zip(begin, spent, strict=True)]
    for _ in range(_CYCLES):
        once = _improved(rates, flight, written, spent)
        if all(abs(new - old) <= _SETTLED * old for new, old in zip(once, rates, strict=True)):
            break
        twice = _improved(once, flight, written, spent)
        rates = _improved(_leap(rates, once, twice), flight, written, spent)
    totals = zip(flight.means, rates, strict=True)
    return Curve(tuple((requests, rate * requests) for requests, rate in totals if rate))


_LARGER = (1.5, 2.0, 3.0, 4.0, 8.0)
"""Numbers of requests for which a measured curve is extrapolated, as factors of the largest measured
number."""


class _Pass(NamedTuple):
    requests: int
    """Number of requests that the engine had admitted."""
    ns: int
    """Duration in ns. If the pass continues a request that had begun before, the time since the previous pass
    is included."""
    tokens: int
    """Output tokens of the pass."""
    decoding: int
    """Number of requests that got a token that is not their first."""
    is_decode: bool


def measured(engines: Iterable[EnginePasses]) -> Curve | None:
    """Return the curve measured by recorded forward passes, by the number of requests that an engine had
    admitted. None if no pass wrote a token.
    """
    passes = [own for engine in engines for own in _passes(engine)]
    if not any(own.tokens for own in passes):
        return None
    bounds = edges(max(own.requests for own in passes))
    ns, spent, tokens = ([0.0] * len(bounds) for _ in range(3))
    for own in passes:
        bin_ = bisect_left(bounds, own.requests)
        ns[bin_] += own.ns
        spent[bin_] += own.ns * own.requests
        tokens[bin_] += own.tokens
    bins = zip(bounds, spent, ns, strict=True)
    means = [whole / part if part else float(most) for most, whole, part in bins]
    rates = [wrote / whole if whole else 0.0 for wrote, whole in zip(tokens, spent, strict=True)]
    least = _LEAST * max(rates)
    rates = _ordered([max(rate, least) for rate in rates], means, spent)
    points = tuple((mean, rate * mean) for mean, rate in zip(means, rates, strict=True) if rate)
    return Curve(points, larger=_larger(passes, points[-1]))


def _larger(passes: Sequence[_Pass], last: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return points of the curve for more requests than were measured. Empty if all decode passes had the
    same number of requests.

    The model: a decode pass takes a fixed time plus a time for each request (least squares of the medians).
    Prefills take the same time per output token as they took in the measured passes.
    """
    durations: dict[int, list[int]] = {}
    for own in passes:
        if own.is_decode:
            durations.setdefault(own.decoding, []).append(own.ns)
    if len(durations) < 2:
        return ()
    medians = [(size, statistics.median(each), len(each)) for size, each in durations.items()]
    number = sum(weight for _, _, weight in medians)
    mean = sum(size * weight for size, _, weight in medians) / number
    spread = sum(weight * (size - mean) ** 2 for size, _, weight in medians)
    each_ns = max(0.0, sum(weight * (size - mean) * ns for size, ns, weight in medians) / spread)
    pass_ns = max(0.0, sum(map(sum, durations.values())) / number - each_ns * mean)
    decoded_ns = sum(pass_ns + each_ns * own.decoding for own in passes if own.decoding)
    prefill_ns = max(0.0, sum(own.ns for own in passes) - decoded_ns) / sum(own.tokens for own in passes)
    most, total = last
    points = []
    for factor in _LARGER:
        requests = most * factor
        rate = requests / (pass_ns + (each_ns + prefill_ns) * requests)
        total = max(total, min(rate, total * factor))
        points.append((requests, total))
    return tuple(points)


def _passes(engine: EnginePasses) -> Iterator[_Pass]:
    rows, served = engine.rows, engine.noted.served
    begun: set[int] = set()
    before_ns = 0
    for at, (begin_ns, end_ns) in enumerate(zip(engine.begins_ns, engine.ends_ns, strict=True)):
        own = slice(rows[at], rows[at + 1])
        requests = served.request[own]
        if requests:
            known = begun.intersection(requests)
            yield _Pass(
                requests=max(engine.noted.passes.running[at], len(requests)),
                ns=end_ns - (before_ns if known else begin_ns),
                tokens=sum(served.output[own]),
                decoding=len(known),
                is_decode=engine.noted.passes.kind[at] in ("decode", "speculative"),
            )
        begun.update(requests)
        before_ns = end_ns


def _leap(rates: Sequence[float], once: Sequence[float], twice: Sequence[float]) -> list[float]:
    """Extrapolate the rates from two iterations of the fit, which saves many iterations.

    The scheme is S3 of Varadhan and Roland (2008), applied to logarithms.
    """
    steps = [math.log(new / old) if old else 0.0 for new, old in zip(once, rates, strict=True)]
    bends = [
        math.log(last / new) - step if new else 0.0
        for last, new, step in zip(twice, once, steps, strict=True)
    ]
    bend = math.hypot(*bends)
    length = min(_LONGEST, max(1.0, math.hypot(*steps) / bend)) if bend else 1.0
    leaps = [2 * length * step + length**2 * bent for step, bent in zip(steps, bends, strict=True)]
    return [
        rate * math.exp(max(-_FARTHEST, min(leap, _FARTHEST)))
        for rate, leap in zip(rates, leaps, strict=True)
    ]


def _improved(
    rates: Sequence[float], flight: Flight, written: Sequence[float], spent: Sequence[float]
) -> list[float]:
    served = flight.served(rates)
    least_served = _ROUNDING * sum(served)
    if min(served) < least_served:
        served = [max(tokens, least_served) for tokens in served]
    factors = list(map(truediv, written, served))
    better = [
        tokens / ns * rate if ns else 0.0
        for tokens, ns, rate in zip(flight.by_bin(factors), spent, rates, strict=True)
    ]
    least = _LEAST * max(better)
    return _ordered(
        [max(rate, least) if ns else 0.0 for rate, ns in zip(better, spent, strict=True)], flight.means, spent
    )


def _ordered(rates: Sequence[float], means: Sequence[float], spent: Sequence[float]) -> list[float]:
    """Return the nearest rates for which, with more requests, the replica is not slower and no request is
    faster.
    """
    bins = [bin_ for bin_, ns in enumerate(spent) if ns]
    requests = [means[bin_] for bin_ in bins]
    walls = [spent[bin_] / mean for bin_, mean in zip(bins, requests, strict=True)]
    totals = _ascending([rates[bin_] * mean for bin_, mean in zip(bins, requests, strict=True)], walls)
    falling = [-total / mean for total, mean in zip(totals, requests, strict=True)]
    ordered = dict(zip(bins, _ascending(falling, [spent[bin_] for bin_ in bins]), strict=True))
    return [-ordered.get(bin_, 0.0) for bin_ in range(len(rates))]


def _ascending(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest ascending values: falling neighbours are replaced by their mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]


def speeds(flight: Flight, curve: Curve, replicas: int) -> tuple[float, ...]:
    """Return the speed of each replica as a factor of the curve, or 1 if the replica had few requests."""
    written, given, counts = [0.0] * replicas, [0.0] * replicas, [0] * replicas
    served = flight.served([curve.rate(mean) for mean in flight.means])
    for replica, tokens, expected in zip(flight.replicas, flight.tokens, served, strict=True):
        if tokens:
            counts[replica] += 1
            written[replica] += tokens
            given[replica] += expected
    return tuple(
        tokens / expected if count >= _ENOUGH and expected else 1.0
        for tokens, expected, count in zip(written, given, counts, strict=True)
    )
