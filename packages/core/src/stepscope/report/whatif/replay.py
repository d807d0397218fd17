"""The discrete-event replay of a rollout.

A replica serves its requests at once, each at the rate of the service curve (processor sharing). Tools run in
a pool that takes them in the order in which they come; without a pool, each takes its measured time. Rewards,
and the time between calls, take as long as measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.report.whatif.curve import Curve
from stepscope.report.whatif.model import Call, Trajectory

_NEVER = float("inf")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a replay, and who takes which."""

    curve: Curve
    speeds: tuple[float, ...]
    """By replica: the factor of its speed to the curve."""
    works: Sequence[float]
    """By `Call.number`: the tokens that a generation needs."""
    assigned: Sequence[Sequence[int]] | None = None
    """By trajectory and generation: its replica. None: the replica with the fewest requests in flight."""
    tool_pool: int | None = None
    at_once: int | None = None
    """Trajectories that can run at once. None: each starts when it was measured to."""


def replay(trajectories: Sequence[Trajectory], rules: Rules) -> list[float]:
    """Return the end of each trajectory, in ns from the begin of the rollout."""
    return _Replay(trajectories, rules).run()


class _Place(NamedTuple):
    """A call of a trajectory in the replay."""

    trajectory: int
    call: Call


_Event: TypeAlias = "tuple[float, int, str, int, _Place | None]"
"""(time, order, kind, trajectory, call)."""


class _Replica:
    """A server that shares its speed among its requests."""

    def __init__(self, rates: Sequence[float], speed: float) -> None:
        """
        Args:
            rates: Of each request, by the number of requests in flight.
        """
        self.ends_at = _NEVER
        self.requests: list[tuple[float, int, _Place]] = []
        self._rates, self._speed = rates, speed
        self._served, self._at = 0.0, 0.0
        """Tokens that a request in flight all the time has got, up to that time."""

    def add(self, at: float, order: int, work: float, place: _Place) -> None:
        self._advance(at)
        heappush(self.requests, (self._served + work, order, place))
        self._plan()

    def pop(self) -> _Place:
        """Remove the request that ends now."""
        self._at, self._served = self.ends_at, self.requests[0][0]
        place = heappop(self.requests)[2]
        self._plan()
        return place

    def _advance(self, at: float) -> None:
        if self.requests:
            self._served += (at - self._at) * self._rate()
        self._at = at

    def _plan(self) -> None:
        if self.requests:
            self.ends_at = self._at + max(0.0, self.requests[0][0] - self._served) / self._rate()
        else:
            self.ends_at = _NEVER

    def _rate(self) -> float:
        return self._rates[len(self.requests)] * self._speed


class _Replay:
    def __init__(self, trajectories: Sequence[Trajectory], rules: Rules) -> None:
        self._trajectories, self._rules = trajectories, rules
        most = sum(_widest(trajectory) for trajectory in trajectories)
        rates = [0.0, *(rules.curve.rate(requests) for requests in range(1, most + 1))]
        self._replicas = [_Replica(rates, speed) for speed in rules.speeds]
        self._served: list[tuple[float, int]] = []
        """(end of its next request, replica)."""
        self._events: list[_Event] = []
        self._order = 0
        self._phase = [0] * len(trajectories)
        self._running = [0] * len(trajectories)
        """Calls of the present phase that have not ended."""
        self._generated = [0] * len(trajectories)
        self._ends = [0.0] * len(trajectories)
        self._waiting: deque[_Place] = deque()
        self._free = rules.tool_pool
        self._unstarted = deque(range(len(trajectories)))

    def run(self) -> list[float]:
        self._start()
        while True:
            timed = self._events[0][0] if self._events else _NEVER
            ends_at, index = self._next_served()
            if timed == ends_at == _NEVER:
                return self._ends
            if ends_at <= timed:
                place = self._replicas[index].pop()
                self._note(index)
                self._end_call(ends_at, place)
            else:
                at, _, kind, trajectory, place_or_none = heappop(self._events)
                self._handle(at, kind, trajectory, place_or_none)

    def _note(self, index: int) -> None:
        """Note when the next request of a replica ends. Earlier notes of it are void."""
        heappush(self._served, (self._replicas[index].ends_at, index))

    def _next_served(self) -> tuple[float, int]:
        """Return the end of the request that ends next, and its replica."""
        while self._served and self._served[0][0] != self._replicas[self._served[0][1]].ends_at:
            heappop(self._served)
        return self._served[0] if self._served else (_NEVER, 0)

    def _start(self) -> None:
        if self._rules.at_once is None:
            for index, trajectory in enumerate(self._trajectories):
                self._plan(trajectory.start_ns, "start", index)
            return
        for _ in range(min(self._rules.at_once, len(self._trajectories))):
            index = self._unstarted.popleft()
            self._plan(self._trajectories[index].start_ns, "start", index)

    def _plan(self, at: float, kind: str, trajectory: int, place: _Place | None = None) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, trajectory, place))

    def _handle(self, at: float, kind: str, trajectory: int, place: _Place | None) -> None:
        if kind == "start":
            self._next_phase(at, trajectory)
        elif kind == "end":
            self._end(at, trajectory)
        elif place is not None:
            (self._begin_call if kind == "call" else self._end_call)(at, place)

    def _next_phase(self, at: float, trajectory: int) -> None:
        played = self._trajectories[trajectory]
        if self._phase[trajectory] == len(played.phases):
            self._plan(at + played.rest_ns, "end", trajectory)
            return
        phase = played.phases[self._phase[trajectory]]
        self._phase[trajectory] += 1
        self._running[trajectory] = len(phase.calls)
        for call in phase.calls:
            self._plan(at + phase.gap_ns + call.offset_ns, "call", trajectory, _Place(trajectory, call))

    def _begin_call(self, at: float, place: _Place) -> None:
        call = place.call
        if call.kind == "generate":
            self._order += 1
            index = self._replica_of(place)
            self._replicas[index].add(at, self._order, self._rules.works[call.number], place)
            self._note(index)
        elif call.kind == "tool" and self._free is not None:
            if self._free:
                self._free -= 1
                self._plan(at + call.busy_ns, "done", place.trajectory, place)
            else:
                self._waiting.append(place)
        else:
            self._plan(at + call.busy_ns + call.wait_ns, "done", place.trajectory, place)

    def _replica_of(self, place: _Place) -> int:
        if self._rules.assigned is None:
            return min(range(len(self._replicas)), key=lambda index: len(self._replicas[index].requests))
        turn = self._generated[place.trajectory]
        self._generated[place.trajectory] += 1
        return self._rules.assigned[place.trajectory][turn]

    def _end_call(self, at: float, place: _Place) -> None:
        if place.call.kind == "tool" and self._free is not None:
            if self._waiting:
                next_place = self._waiting.popleft()
                self._plan(at + next_place.call.busy_ns, "done", next_place.trajectory, next_place)
            else:
                self._free += 1
        self._running[place.trajectory] -= 1
        if not self._running[place.trajectory]:
            self._next_phase(at, place.trajectory)

    def _end(self, at: float, trajectory: int) -> None:
        self._ends[trajectory] = at
        if self._rules.at_once is not None and self._unstarted:
            self._plan(at, "start", self._unstarted.popleft())


def _widest(trajectory: Trajectory) -> int:
    """Return the most calls that the trajectory has at once."""
    return max((len(phase.calls) for phase in trajectory.phases), default=0)
