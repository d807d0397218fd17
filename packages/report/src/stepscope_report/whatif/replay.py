"""The discrete-event replay of a rollout.

A replica serves its requests at the same time, each at the rate of the service curve (processor sharing). If
a replica has a number of slots, it serves at most that many requests, and further requests wait in order of
arrival. Tools run in a pool that takes them in order of arrival; without a pool, each tool takes its measured
time. Rewards, and gaps between calls, take their measured time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

import msgspec

from stepscope_report.whatif import Call, Trajectory
from stepscope_report.whatif.changes import Changes
from stepscope_report.whatif.curve import Curve

_NEVER = float("inf")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a replay, and the assignment of generations to replicas."""

    curve: Curve
    speeds: tuple[float, ...]
    """Speed of each replica as a factor of the curve."""
    works: Sequence[float]
    """Tokens that each generation needs, by `Call.number`."""
    assigned: Sequence[Sequence[int]] | None = None
    """Replica of each generation, by trajectory. None if each generation uses the replica that has the fewest
    requests when the generation starts."""
    slots: int | None = None
    """Number of requests that a replica serves at once, or None for no limit."""
    tool_pool: int | None = None
    at_once: int | None = None
    """Number of trajectories that can run at once. None to start each at its measured time."""


def replay(trajectories: Sequence[Trajectory], rules: Rules) -> list[float]:
    """Return the end of each trajectory, in ns from the start of the rollout."""
    return _Replay(trajectories, rules).run()


_Placed: TypeAlias = "tuple[int, Call]"
"""(index of the trajectory, call) in the replay."""
_Event: TypeAlias = "tuple[float, int, int, int, Call | None]"
"""(time, order, kind, trajectory, call). A negative order stands for a replica whose next request ends."""
_START, _CALL, _DONE, _END = range(4)


class _Replica:
    """A replica that shares its speed among its requests."""

    def __init__(self, rate_of: Callable[[int], float], speed: float, slots: int | None) -> None:
        self.ends_at = _NEVER
        """Time at which the replica's next request ends."""
        self.requests: list[tuple[float, int, _Placed]] = []
        self.waiting: deque[tuple[int, float, _Placed]] = deque()
        """Requests that wait for a slot: (order, work, call)."""
        self._rate_of, self._speed, self._slots = rate_of, speed, slots
        self._rate = 0.0
        """Present rate of each request, in tokens per ns."""
        self._served, self._at = 0.0, 0.0
        """Tokens that a request in flight since the start would have been served until `_at`."""

    @property
    def load(self) -> int:
        return len(self.requests) + len(self.waiting)

    def add(self, at: float, order: int, work: float, placed: _Placed) -> None:
        if self._slots is not None and len(self.requests) >= self._slots:
            self.waiting.append((order, work, placed))
            return
        if self.requests:
            self._served += (at - self._at) * self._rate
        heappush(self.requests, (self._served + work, order, placed))
        self._plan(at)

    def pop(self) -> _Placed:
        """Remove the request that ends now, and start the first waiting one. Return the removed request."""
        self._served, _, placed = heappop(self.requests)
        if self.waiting:
            order, work, first = self.waiting.popleft()
            heappush(self.requests, (self._served + work, order, first))
        self._plan(self.ends_at)
        return placed

    def _plan(self, at: float) -> None:
        self._at = at
        requests = self.requests
        if not requests:
            self.ends_at = _NEVER
            return
        self._rate = self._rate_of(len(requests)) * self._speed
        left = requests[0][0] - self._served
        self.ends_at = at + left / self._rate if left > 0.0 else at


class _Replay:
    def __init__(self, trajectories: Sequence[Trajectory], rules: Rules) -> None:
        self._trajectories, self._rules = trajectories, rules
        rate_of = cache(rules.curve.rate)
        self._replicas = [_Replica(rate_of, speed, rules.slots) for speed in rules.speeds]
        self._events: list[_Event] = []
        self._order = 0
        self._phase = [0] * len(trajectories)
        self._running = [0] * len(trajectories)
        """Number of calls in each trajectory's current phase that have not ended."""
        self._generated = [0] * len(trajectories)
        self._ends = [0.0] * len(trajectories)
        self._waiting: deque[_Placed] = deque()
        self._free = rules.tool_pool
        self._unstarted = deque(range(len(trajectories)))

    def run(self) -> list[float]:
        at_once = self._rules.at_once
        for played in self._trajectories[:at_once]:
            self._start(played.start_ns)
        events, replicas = self._events, self._replicas
        while events:
            at, order, kind, trajectory, call = heappop(events)
            if order < 0:
                # Otherwise requests came or went since, and the event is out of date.
                if replicas[order].ends_at == at:
                    self._end_served(at, order)
            elif call is None:
                self._next_phase(at, trajectory) if kind == _START else self._start(at)
            elif kind == _CALL:
                self._begin_call(at, trajectory, call)
            else:
                self._end_call(at, trajectory, call)
        return self._ends

    def _start(self, at: float) -> None:
        """Start the next trajectory if one is left."""
        if self._unstarted:
            self._plan(at, _START, self._unstarted.popleft(), None)

    def _plan(self, at: float, kind: int, trajectory: int, call: Call | None) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, trajectory, call))

    def _next_phase(self, at: float, trajectory: int) -> None:
        played, place = self._trajectories[trajectory], self._phase[trajectory]
        if place == len(played.phases):
            self._ends[trajectory] = at + played.rest_ns
            if self._unstarted:  # the number of running trajectories is limited: the next one starts now
                self._plan(self._ends[trajectory], _END, trajectory, None)
            return
        phase = played.phases[place]
        self._phase[trajectory] = place + 1
        self._running[trajectory] = len(phase.calls)
        for call in phase.calls:
            self._plan(at + phase.gap_ns + call.offset_ns, _CALL, trajectory, call)

    def _begin_call(self, at: float, trajectory: int, call: Call) -> None:
        if call.kind == "generate":
            self._order += 1
            index = self._replica_of(trajectory)
            replica = self._replicas[index]
            replica.add(at, self._order, self._rules.works[call.number], (trajectory, call))
            heappush(self._events, (replica.ends_at, index - len(self._replicas), _DONE, 0, None))
        elif call.kind == "tool" and self._free is not None:
            if self._free:
                self._free -= 1
                self._plan(at + call.busy_ns, _DONE, trajectory, call)
            else:
                self._waiting.append((trajectory, call))
        else:
            self._plan(at + call.busy_ns + call.wait_ns, _DONE, trajectory, call)

    def _end_served(self, at: float, order: int) -> None:
        replica = self._replicas[order]
        trajectory, call = replica.pop()
        if replica.requests:
            heappush(self._events, (replica.ends_at, order, _DONE, 0, None))
        self._end_call(at, trajectory, call)

    def _replica_of(self, trajectory: int) -> int:
        if self._rules.assigned is None:
            return min(range(len(self._replicas)), key=lambda index: self._replicas[index].load)
        turn = self._generated[trajectory]
        self._generated[trajectory] = turn + 1
        return self._rules.assigned[trajectory][turn]

    def _end_call(self, at: float, trajectory: int, call: Call) -> None:
        if self._free is not None and call.kind == "tool":
            if self._waiting:
                next_trajectory, next_call = self._waiting.popleft()
                self._plan(at + next_call.busy_ns, _DONE, next_trajectory, next_call)
            else:
                self._free += 1
        self._running[trajectory] -= 1
        if not self._running[trajectory]:
            self._next_phase(at, trajectory)


def assignment(
    trajectories: Sequence[Trajectory], works: Sequence[float], changes: Changes, replicas: int
) -> list[list[int]] | None:
    """Return `Rules.assigned`: the replica of each generation by trajectory, or None.

    Without a change of `balance`, generations keep their replicas. If the number of replicas changes,
    trajectories are assigned to the replicas in turn, or generations if a trajectory used several replicas.

    Args:
        works: Tokens that each generation needs, by `Call.number`.
        replicas: Number of replicas in the measured step.
    """
    if changes.balance == "load":
        return None
    if changes.balance == "length":
        return _by_length(trajectories, works, changes.replicas)
    if changes.replicas == replicas:
        return [[call.replica or 0 for call in played.generations()] for played in trajectories]
    if all(len({call.replica for call in played.generations()}) <= 1 for played in trajectories):
        return [
            [place % changes.replicas] * len(played.generations())
            for place, played in enumerate(trajectories)
        ]
    turn = count()
    return [[next(turn) % changes.replicas for _ in played.generations()] for played in trajectories]


def _by_length(trajectories: Sequence[Trajectory], works: Sequence[float], replicas: int) -> list[list[int]]:
    """Return the replica of each generation, with whole trajectories assigned: the longest first, each to the
    replica with the fewest tokens so far.
    """
    lengths = [sum(works[call.number] for call in played.generations()) for played in trajectories]
    loads = [0.0] * replicas
    dealt: list[list[int]] = [[] for _ in trajectories]
    for place in sorted(range(len(trajectories)), key=lambda place: -lengths[place]):
        replica = min(range(replicas), key=loads.__getitem__)
        loads[replica] += lengths[place]
        dealt[place] = [replica] * len(trajectories[place].generations())
    return dealt
