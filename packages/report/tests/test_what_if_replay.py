"""The replay of a rollout, and the curve of its replicas, on cases that can be computed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from stepscope_report.whatif import Call, CallKind, Phase, Trajectory, tool_pool, trajectories_at_once
from stepscope_report.whatif.curve import Curve, Flight, fit
from stepscope_report.whatif.replay import Rules, replay

SATURATED = Curve(((1.0, 1.0), (100.0, 1.0)))
"""One token per ns, for any number of requests together."""
PARALLEL = Curve(((1.0, 1.0), (100.0, 100.0)))
"""One token per ns for each request."""


def a_call(number: int, kind: CallKind, ns: int, *, offset_ns: int = 0) -> Call:
    return Call(number=number, kind=kind, start_ns=0, end_ns=ns, offset_ns=offset_ns, replica=0, tokens=ns)


def a_trajectory(*phases: Phase, start_ns: int = 0, rest_ns: int = 0) -> Trajectory:
    return Trajectory(name="t", start_ns=start_ns, end_ns=start_ns, phases=phases, rest_ns=rest_ns)


def rules(
    curve: Curve, works: Sequence[float], assigned: list[list[int]] | None, replicas: int = 1, **more: int
) -> Rules:
    return Rules(curve=curve, speeds=(1.0,) * replicas, works=works, assigned=assigned, **more)


def generating(count: int) -> list[Trajectory]:
    return [a_trajectory(Phase(0, (a_call(number, "generate", 100),))) for number in range(count)]


def test_trajectories_start_as_others_end_if_they_have_a_limit() -> None:
    tools = [a_trajectory(Phase(0, (a_call(number, "tool", 10),))) for number in range(5)]
    assert replay(tools, rules(SATURATED, [0.0] * 5, [[]] * 5, at_once=2)) == [10, 10, 20, 20, 30]


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_of_tools_takes_them_in_the_order_in_which_they_come(seed: int) -> None:
    draw = random.Random(seed)
    starts = sorted(draw.sample(range(10_000), 80))
    lengths = [draw.randrange(1, 400) for _ in starts]
    places, ends = [0] * 3, []
    for start, length in zip(starts, lengths, strict=True):
        ends.append(max(start, heappop(places)) + length)
        heappush(places, ends[-1])
    played = [
        a_trajectory(Phase(0, (a_call(number, "tool", length),)), start_ns=start)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    queued = Rules(curve=SATURATED, speeds=(1.0,), works=[0.0] * 80, assigned=[[]] * 80, tool_pool=3)
    assert replay(played, queued) == pytest.approx(ends)


def generate(number: int, start_ns: int, end_ns: int, tokens: int) -> Call:
    return Call(number=number, kind="generate", start_ns=start_ns, end_ns=end_ns, replica=0, tokens=tokens)


def test_more_requests_never_do_less_nor_get_more_each() -> None:
    """Tokens at random: a fit without this order gives rates far off where few requests were."""
    draw = random.Random(0)
    calls = []
    for number in range(60):
        start = draw.randrange(2000)
        calls.append(generate(number, start, start + draw.randrange(50, 800), draw.randrange(1, 200)))
    points = fit(Flight(calls)).points
    assert len(points) > 5
    for (fewer, little), (more, much) in pairwise(points):
        assert little <= much * (1 + 1e-9)
        assert much / more <= little / fewer * (1 + 1e-9)


def test_the_fit_gives_the_curve_that_made_the_times() -> None:
    """Requests start 40 ns apart and have 20 lengths, so that many numbers of requests are measured."""
    made = Curve(((1.0, 1.0), (4.0, 2.5), (8.0, 4.0), (30.0, 5.0)))
    works = [100.0 + 37 * (number * 7 % 20) for number in range(200)]
    started = [a_trajectory(*played.phases, start_ns=90 * at) for at, played in enumerate(generating(200))]
    ends = replay(started, rules(made, works, [[0]] * 200))
    calls = [generate(at, 90 * at, round(end), round(works[at])) for at, end in enumerate(ends)]
    flight = Flight(calls)
    curve = fit(flight)
    assert len(curve.points) > 4
    for requests, total in curve.points:
        assert total == pytest.approx(made.rate(requests) * requests, rel=0.1)
    assert flight.served_by(curve.rate) == pytest.approx(works, rel=0.1)


def tool_at(start_ns: int, end_ns: int, gap_ns: int, wait_ns: int = 0) -> Trajectory:
    call = Call(number=0, kind="tool", start_ns=start_ns, end_ns=end_ns, wait_ns=wait_ns)
    return Trajectory(
        name="t", start_ns=start_ns - gap_ns, end_ns=end_ns, phases=(Phase(gap_ns, (call,)),), rest_ns=0
    )


def test_a_pool_of_tools_is_seen_by_waits_inside_of_them() -> None:
    size, _ = tool_pool([tool_at(0, 10 * (place + 1), 0, wait_ns=10 * place) for place in range(4)])
    assert size == 1


def test_a_limit_of_trajectories_is_seen_by_starts_at_ends() -> None:
    limited = [tool_at(begin, begin + 10, 0) for begin in (0, 0, 10, 10, 20, 20)]
    spread = [tool_at(begin, begin + 10, 0) for begin in (0, 0, 50, 90, 130)]
    assert trajectories_at_once(limited) == 2
    assert trajectories_at_once(spread) is None


def test_no_rate_of_the_curve_is_zero() -> None:
    """The second request says far too many tokens, as a damaged file may."""
    lengths = [(0, 10, 1), (0, 20, 10**15), (100, 110, 1), (100, 130, 1), (100, 130, 1)]
    calls = [generate(at, *length) for at, length in enumerate(lengths)]
    assert all(total > 0 for _, total in fit(Flight(calls)).points)


def test_a_slow_replica_takes_longer() -> None:
    slow = Rules(curve=PARALLEL, speeds=(1.0, 0.5), works=[100.0] * 2, assigned=[[0], [1]])
    assert replay(generating(2), slow) == pytest.approx([100, 200])


def test_gaps_offsets_and_rests_take_as_long_as_measured() -> None:
    calls = (a_call(0, "tool", 30), a_call(1, "reward", 20, offset_ns=15))
    played = a_trajectory(Phase(5, calls), Phase(7, (a_call(2, "reward", 3),)), start_ns=100, rest_ns=4)
    assert replay([played], rules(SATURATED, [0.0] * 3, [[]])) == pytest.approx([100 + 5 + 35 + 7 + 3 + 4])
