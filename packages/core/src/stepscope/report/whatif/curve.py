"""The service curve of replicas: tokens per second by the number of requests in flight, fitted from a step.

A replica with n requests in flight serves each at the same rate r(n). A request of w tokens that is in flight
for the times T(n) then has w = sum of T(n) r(n). The rates are those of the largest likelihood if tokens come
at random (Richardson and Lucy's iteration, which keeps them positive). Requests in flight include those that
wait in the engine, so that a limit of the engine shows as a curve that stays flat.

Between measured numbers of requests, the tokens per second of the replica are interpolated. Below the
smallest number, a request is served at the rate of the smallest; above the largest, the replica does no more
per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.report.whatif.model import Call

_ITERATIONS = 30
"""More fit the noise."""
_SINGLE = 4
"""Up to so many requests, each number has a rate of its own."""
_LEAST = 1e-6
"""No rate is below this part of the highest, so that each request ends."""
_ENOUGH = 5
"""Requests of a replica whose speed is told from the others'."""
_WIDTH = 1.5
"""Above, a bin ends at so many times its begin."""


class Exposure(msgspec.Struct, frozen=True):
    """The times of one call by the number of requests in flight beside it, in bins."""

    tokens: int | None
    replica: int
    ns_by_bin: Mapping[int, float]


class Curve(msgspec.Struct, frozen=True):
    """Tokens per ns of a replica by its requests in flight."""

    points: tuple[tuple[float, float], ...]
    """(requests, tokens per ns of all of them), ascending."""

    def rate(self, requests: float) -> float:
        """Return the tokens per ns of each of `requests` requests."""
        return _total(self.points, requests) / requests


def _total(points: Sequence[tuple[float, float]], requests: float) -> float:
    place = bisect_left(points, (requests, 0.0))
    if place == len(points):
        return points[-1][1]
    above, total = points[place]
    if place == 0:
        return total * requests / above
    below, least = points[place - 1]
    return least + (total - least) * (requests - below) / (above - below)


def edges(most: int) -> list[int]:
    """Return the largest number of requests of each bin, up to `most`."""
    bounds = list(range(1, min(most, _SINGLE) + 1))
    while bounds[-1] < most:
        bounds.append(max(bounds[-1] + 1, round(bounds[-1] * _WIDTH)))
    return bounds


def exposures(calls: Sequence[Call]) -> tuple[list[Exposure], list[float]]:
    """Return the exposure of each call of a replica, and the mean number of requests of each bin."""
    by_replica = defaultdict[int, list[Call]](list)
    for call in calls:
        by_replica[call.replica or 0].append(call)
    flights = {replica: _in_flight(of_replica) for replica, of_replica in by_replica.items()}
    bounds = edges(max(max(counts) for _, counts in flights.values()))
    spent, weighted = [0.0] * len(bounds), [0.0] * len(bounds)
    rows: dict[int, Exposure] = {}
    for replica, (times, counts) in flights.items():
        places = [bisect_left(bounds, count) for count in counts]
        sums = _sums(times, places, len(bounds))
        for start_ns, end_ns, count, place in zip(times, times[1:], counts, places, strict=False):
            if count:
                spent[place] += end_ns - start_ns
                weighted[place] += (end_ns - start_ns) * count
        for call in by_replica[replica]:
            first, last = sums[call.start_ns], sums[call.end_ns]
            ns_by_bin = {
                bin_: end - start
                for bin_, (start, end) in enumerate(zip(first, last, strict=True))
                if end > start
            }
            rows[call.number] = Exposure(call.tokens, replica, ns_by_bin)
    means = [
        total / ns if ns else float(bound) for total, ns, bound in zip(weighted, spent, bounds, strict=True)
    ]
    return [rows[call.number] for call in calls], means


def _in_flight(calls: Sequence[Call]) -> tuple[list[int], list[int]]:
    """Return the times at which the number of requests changes, and the number from each of them on."""
    changes = defaultdict[int, int](int)
    for call in calls:
        changes[call.start_ns] += 1
        changes[call.end_ns] -= 1
    times, counts, count = sorted(changes), [], 0
    for time in times:
        count += changes[time]
        counts.append(count)
    return times, counts


def _sums(times: Sequence[int], places: Sequence[int], bins: int) -> dict[int, tuple[float, ...]]:
    """Return the time spent in each bin up to each time."""
    so_far, sums = [0.0] * bins, {}
    for index, time in enumerate(times):
        if index:
            so_far[places[index - 1]] += time - times[index - 1]
        sums[time] = tuple(so_far)
    return sums


def fit(rows: Sequence[Exposure], means: Sequence[float], weights: Sequence[int] | None = None) -> Curve:
    """Return the curve of the rows that say their tokens.

    Args:
        means: As from `exposures`.
        weights: How often each row counts. None: once.
    """
    counted = [
        (row.tokens, row.ns_by_bin, weight)
        for row, weight in zip(rows, weights or [1] * len(rows), strict=True)
        if row.tokens and row.ns_by_bin and weight
    ]
    spent = defaultdict[int, float](float)
    for _, ns_by_bin, weight in counted:
        for bin_, ns in ns_by_bin.items():
            spent[bin_] += ns * weight
    mean = sum(tokens * weight for tokens, _, weight in counted) / sum(spent.values())
    rates = dict.fromkeys(spent, mean)
    for _ in range(_ITERATIONS):
        rates = _improved(rates, counted, spent)
    return Curve(tuple((means[bin_], rates[bin_] * means[bin_]) for bin_ in sorted(rates)))


def _improved(
    rates: Mapping[int, float],
    rows: Sequence[tuple[int, Mapping[int, float], int]],
    spent: Mapping[int, float],
) -> dict[int, float]:
    """Return the rates after one iteration."""
    tokens_by_bin = dict.fromkeys(rates, 0.0)
    for tokens, ns_by_bin, weight in rows:
        factor = weight * tokens / sum(ns * rates[bin_] for bin_, ns in ns_by_bin.items())
        for bin_, ns in ns_by_bin.items():
            tokens_by_bin[bin_] += ns * rates[bin_] * factor
    least = _LEAST * max(tokens / spent[bin_] for bin_, tokens in tokens_by_bin.items())
    return {bin_: max(tokens / spent[bin_], least) for bin_, tokens in tokens_by_bin.items()}


def speeds(
    rows: Sequence[Exposure], curve: Curve, means: Sequence[float], replicas: int
) -> tuple[float, ...]:
    """Return the speed of each replica, as a factor of the curve; 1 if it has few requests."""
    written, given, counts = [0.0] * replicas, [0.0] * replicas, [0] * replicas
    rates = [curve.rate(mean) for mean in means]
    for row in rows:
        if row.tokens:
            counts[row.replica] += 1
            written[row.replica] += row.tokens
            given[row.replica] += sum(ns * rates[bin_] for bin_, ns in row.ns_by_bin.items())
    return tuple(
        tokens / expected if count >= _ENOUGH and expected else 1.0
        for tokens, expected, count in zip(written, given, counts, strict=True)
    )


def served(calls: Sequence[Call], curve: Curve) -> list[float]:
    """Return the tokens that the curve gives each call in the time that it took."""
    by_replica = defaultdict[int, list[Call]](list)
    for call in calls:
        by_replica[call.replica or 0].append(call)
    clocks = {replica: _clock(of_replica, curve) for replica, of_replica in by_replica.items()}
    return [
        clocks[call.replica or 0][call.end_ns] - clocks[call.replica or 0][call.start_ns] for call in calls
    ]


def _clock(calls: Sequence[Call], curve: Curve) -> dict[int, float]:
    """Return the tokens that one request in flight all the time would have got up to each time."""
    times, counts = _in_flight(calls)
    clock, tokens = {}, 0.0
    for index, time in enumerate(times):
        if index and counts[index - 1]:
            tokens += (time - times[index - 1]) * curve.rate(counts[index - 1])
        clock[time] = tokens
    return clock
