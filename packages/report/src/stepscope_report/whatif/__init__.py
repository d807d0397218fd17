"""Predictions of a step's duration with a change, by a discrete-event replay of the step.

Here are the parts of a step that a replay needs: trajectories with their calls, the driver's stages, and
limits.

Times are in ns. Times of a trajectory count from the start of the rollout. The limits are the numbers of
tools, of requests per replica, and of trajectories that can run at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from stepscope_report.table import grouped
from stepscope_report.timeline.model import EnginePasses

CallKind: TypeAlias = Literal["generate", "tool", "reward"]
StageKind: TypeAlias = Literal["train", "reward", "weights", "other"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a trajectory: to a replica, to a tool, or to a reward."""

    number: int
    """Index of the call among all calls of the step."""
    kind: CallKind
    start_ns: int
    end_ns: int
    offset_ns: int = 0
    """Start of the call in ns after the start of its phase."""
    wait_ns: int = 0
    """Time in ns for which the call waited: a tool for a place in the pool, a generation for a slot."""
    replica: int | None = None
    """Index of the generation's replica in `Rollout.replicas`. None for calls that are no generations."""
    tokens: int | None = None
    """Output tokens of a generation, or None if no span states them."""

    @property
    def busy_ns(self) -> int:
        """Return the duration of the call without its wait, in ns."""
        return self.end_ns - self.start_ns - self.wait_ns


class Phase(msgspec.Struct, frozen=True):
    """Calls of one trajectory that overlap. The next phase begins when all calls of the phase have ended."""

    gap_ns: int
    """Time before the phase in which the trajectory had no call, in ns."""
    calls: tuple[Call, ...]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory with its phases in order."""

    name: str
    start_ns: int
    end_ns: int
    phases: tuple[Phase, ...]
    rest_ns: int
    """Time after the last phase of the trajectory, in ns."""
    consumed: bool = True
    """False if the step does not consume the trajectory. Such a trajectory only adds load to the
    replicas and the tools."""

    def calls(self) -> Iterator[Call]:
        for phase in self.phases:
            yield from phase.calls

    def generations(self) -> list[Call]:
        return [call for call in self.calls() if call.kind == "generate"]

    def tokens(self) -> int:
        """Return the known output tokens of the trajectory."""
        return sum(call.tokens or 0 for call in self.generations())


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    start_ns: int
    """Start of the rollout, as unix time in ns."""
    trajectories: tuple[Trajectory, ...]
    """Trajectories in order of their start."""
    replicas: tuple[str, ...]
    """Names of the replicas, with `unknown` as the last if some calls name no replica."""
    tool_pool: int | None = None
    """Number of tools that can run at once, or None if no tool waited for a place."""
    at_once: int | None = None
    """Number of trajectories that can run at once, or None if the step shows no limit."""
    slots: int | None = None
    """Number of requests that a replica serves at once, or None if no request waited for a replica."""
    curve: tuple[tuple[float, float], ...] = ()
    """The service curve as forward passes measured it: (number of requests, tokens per ns of all these
    requests together), ascending. Empty if too few generations have recorded passes."""
    larger: tuple[tuple[float, float], ...] = ()
    """Points of the curve for more requests than were measured, computed from the passes."""

    @property
    def consumed(self) -> int:
        """Return the number of trajectories that the step consumes."""
        return sum(trajectory.consumed for trajectory in self.trajectories)

    @property
    def wall_ns(self) -> int:
        """Return the time from the start of the rollout to the end of the last consumed trajectory, in ns."""
        return max(trajectory.end_ns for trajectory in self.trajectories if trajectory.consumed)

    def calls(self) -> list[Call]:
        return [call for trajectory in self.trajectories for call in trajectory.calls()]

    def generations(self) -> list[Call]:
        return [call for call in self.calls() if call.kind == "generate"]


class DriverStage(msgspec.Struct, frozen=True):
    """One stage of the driver, before or after the rollout."""

    name: str
    kind: StageKind
    wall_ns: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step as the replay uses it: the driver's stages before the rollout, the rollout, and the driver's
    stages after it.
    """

    number: int
    run_id: str
    wall_ns: int
    before: Sequence[DriverStage]
    rollout: Rollout
    after: Sequence[DriverStage]


_QUEUED = 0.02
"""Smallest ratio of waiting to work from which tools, or requests, count as queued."""
_FULL = 0.9
"""Smallest share of the time with a queue in which a replica serves one number of requests, if that number is
its limit."""
_HANDED_ON = 0.9
"""Smallest share of later trajectories that start when another one ends, if the driver is limited."""
_HAND_OVER_NS = 2_000_000
"""A place that was free for less than this counts as handed on directly."""

_Pair = tuple[int, int]
"""(start, end) in ns."""


def peak(pairs: Iterable[_Pair]) -> int:
    """Return the largest number of intervals that overlap."""
    most = running = 0
    for _, change in _changes(pairs):
        running += change
        most = max(most, running)
    return most


def _changes(pairs: Iterable[_Pair]) -> list[_Pair]:
    return sorted(change for start, end in pairs for change in ((start, 1), (end, -1)))


def tool_pool(trajectories: Sequence[Trajectory]) -> tuple[int | None, tuple[Trajectory, ...]]:
    """Return (size of the pool of tools, trajectories without their waits for a tool). The size is None if no
    tool waited.

    A wait is inside the tool's span if a span below shows the wait. A wait can also be before the span: the
    last part of the gap before the tool, while all places of the pool were occupied.
    """
    tools = [call for trajectory in trajectories for call in trajectory.calls() if call.kind == "tool"]
    worked = [(call.start_ns + call.wait_ns, call.end_ns) for call in tools]
    size, work_ns = peak(worked), sum(call.busy_ns for call in tools)
    full = _full(worked, size)
    shortened = tuple(
        msgspec.structs.replace(trajectory, phases=_shortened(trajectory, full))
        for trajectory in trajectories
    )
    waited_ns = sum(call.wait_ns for call in tools) + _gaps_ns(trajectories) - _gaps_ns(shortened)
    if not tools or waited_ns < _QUEUED * work_ns:
        return None, tuple(trajectories)
    return size, shortened


def _full(worked: Sequence[_Pair], size: int) -> list[_Pair]:
    """Return the stretches of time in which `size` tools ran."""
    stretches: list[_Pair] = []
    running, since = 0, 0
    for time, change in _changes(worked):
        if change > 0 and running == size - 1:
            since = time
        elif change < 0 and running == size:
            if stretches and since - stretches[-1][1] < _HAND_OVER_NS:
                since = stretches.pop()[0]
            stretches.append((since, time))
        running += change
    return stretches


def _shortened(trajectory: Trajectory, full: Sequence[_Pair]) -> tuple[Phase, ...]:
    return tuple(
        msgspec.structs.replace(phase, gap_ns=phase.gap_ns - _waited(phase, full))
        if phase.calls[0].kind == "tool"
        else phase
        for phase in trajectory.phases
    )


def _waited(phase: Phase, full: Sequence[_Pair]) -> int:
    """Return how long all places of the pool were occupied before a phase, in ns, at most the phase's gap."""
    start_ns = phase.calls[0].start_ns
    place = bisect_right(full, (start_ns, 0)) - 1
    if place < 0 or full[place][1] < start_ns - _HAND_OVER_NS:
        return 0
    return min(phase.gap_ns, start_ns - full[place][0])


def _gaps_ns(trajectories: Iterable[Trajectory]) -> int:
    return sum(phase.gap_ns for trajectory in trajectories for phase in trajectory.phases)


def slots_of_replicas(generations: Sequence[Call]) -> int | None:
    """Return the number of requests that a replica serves at once, or None if the step shows no limit.

    There is a limit if requests wait for replicas, and if the replicas serve the same number of requests for
    nearly all of the time in which requests wait.
    """
    if sum(call.wait_ns for call in generations) < _QUEUED * sum(call.busy_ns for call in generations):
        return None
    served_ns = Counter[int]()
    for calls in grouped(generations, lambda call: call.replica).values():
        served_ns.update(_served_with_a_queue(calls))
    most, ns = served_ns.most_common(1)[0]
    return most if most and ns >= _FULL * served_ns.total() else None


def slots_of_passes(engines: Iterable[EnginePasses]) -> int | None:
    """Return the number of requests that an engine serves at once, from its recorded forward passes. None if
    the passes show no limit, as in `slots_of_replicas`.
    """
    admitted_ns, busy_ns = Counter[int](), 0
    for engine in engines:
        facts = engine.noted.passes
        for at, (begin_ns, end_ns) in enumerate(zip(engine.begins_ns, engine.ends_ns, strict=True)):
            busy_ns += end_ns - begin_ns
            if facts.waiting[at]:
                admitted_ns[facts.running[at]] += end_ns - begin_ns
    if admitted_ns.total() <= _QUEUED * busy_ns:
        return None
    most, ns = admitted_ns.most_common(1)[0]
    return most if most and ns >= _FULL * admitted_ns.total() else None


def _served_with_a_queue(calls: Iterable[Call]) -> Counter[int]:
    """Return {number of requests that a replica served: ns for which other requests waited for it}."""
    changes = sorted(
        change
        for call in calls
        for change in (
            (call.start_ns, 1, 0),
            (call.start_ns + call.wait_ns, -1, 1),
            (call.end_ns, 0, -1),
        )
    )
    times_ns = Counter[int]()
    waiting = serves = at_ns = 0
    for time_ns, waits, served in changes:
        if waiting:
            times_ns[serves] += time_ns - at_ns
        waiting, serves, at_ns = waiting + waits, serves + served, time_ns
    return times_ns


def trajectories_at_once(trajectories: Sequence[Trajectory]) -> int | None:
    """Return the number of trajectories that the driver runs at once, or None if the step shows no limit.

    The limit is the largest number of trajectories that ran at once. It counts as a limit only if nearly
    every later start brings the number of running trajectories back to it.
    """
    starts = sorted(trajectory.start_ns for trajectory in trajectories)
    ends = sorted(trajectory.end_ns for trajectory in trajectories)
    most = peak(zip((t.start_ns for t in trajectories), (t.end_ns for t in trajectories), strict=True))
    later = starts[most:]
    full = sum(bisect_right(starts, start) - bisect_right(ends, start) >= most for start in later)
    return most if later and full >= _HANDED_ON * len(later) else None
