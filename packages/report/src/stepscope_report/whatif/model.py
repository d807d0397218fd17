"""The parts of a step that a replay needs: trajectories of calls, and the stages of its driver.

Times are in ns. Those of a trajectory count from the begin of the rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

CallKind: TypeAlias = Literal["generate", "tool", "reward"]
StageKind: TypeAlias = Literal["train", "reward", "weights", "other"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a trajectory: of a replica, of a tool, or of a reward."""

    number: int
    """Index of the call among all calls of the step."""
    kind: CallKind
    start_ns: int
    end_ns: int
    offset_ns: int = 0
    """Start of the call in ns after the start of its phase."""
    wait_ns: int = 0
    """The part of the call in which it waited: a tool for a place in the pool, or a generation for a slot."""
    replica: int | None = None
    """The index in `Rollout.replicas` of a generation's replica."""
    tokens: int | None = None
    """Number of tokens that a generation wrote, or None if no span states it."""

    @property
    def busy_ns(self) -> int:
        """Return the length of the call without its wait."""
        return self.end_ns - self.start_ns - self.wait_ns


class Phase(msgspec.Struct, frozen=True):
    """Calls that run at once. The next phase begins when all of them have ended."""

    gap_ns: int
    """Time before the phase in which the trajectory had no call."""
    calls: tuple[Call, ...]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory: phases in their order."""

    name: str
    start_ns: int
    end_ns: int
    phases: tuple[Phase, ...]
    rest_ns: int
    """Time after the last phase of the trajectory."""
    consumed: bool = True
    """False if the step does not consume the trajectory, which then only loads the replicas and the tools."""

    def calls(self) -> Iterator[Call]:
        for phase in self.phases:
            yield from phase.calls

    def generations(self) -> list[Call]:
        return [call for call in self.calls() if call.kind == "generate"]

    def tokens(self) -> int:
        """Return the number of tokens that the trajectory wrote, as far as known."""
        return sum(call.tokens or 0 for call in self.generations())


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    start_ns: int
    """Start of the rollout in unix ns."""
    trajectories: tuple[Trajectory, ...]
    """The trajectories in the order of their starts."""
    replicas: tuple[str, ...]
    """Names of the replicas. The last one is `unknown` if some calls name no replica."""
    tool_pool: int | None = None
    """Number of tools that can run at once, or None if no tool waited for a place."""
    at_once: int | None = None
    """Number of trajectories that can run at once, or None if nothing shows a limit."""
    slots: int | None = None
    """Number of requests that a replica serves at once, or None if no request waited in front of a
    replica."""
    curve: tuple[tuple[float, float], ...] = ()
    """The service curve that forward passes measured: (requests, tokens per ns of all of them), ascending.
    Empty if the passes of these requests were not noted."""
    larger: tuple[tuple[float, float], ...] = ()
    """Further points of the curve, for more requests, which the passes suggest."""

    @property
    def consumed(self) -> int:
        """Return the number of trajectories that the step consumes."""
        return sum(trajectory.consumed for trajectory in self.trajectories)

    @property
    def wall_ns(self) -> int:
        """Return the time from the start of the rollout to the end of the last trajectory that the step
        consumes.
        """
        return max(trajectory.end_ns for trajectory in self.trajectories if trajectory.consumed)

    def calls(self) -> list[Call]:
        return [call for trajectory in self.trajectories for call in trajectory.calls()]

    def generations(self) -> list[Call]:
        return [call for call in self.calls() if call.kind == "generate"]


class DriverStage(msgspec.Struct, frozen=True):
    """One stage of the driver before or after the rollout."""

    name: str
    kind: StageKind
    wall_ns: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step as the replay sees it: the driver's stages before the rollout, the rollout, and the stages after
    it.
    """

    number: int
    run_id: str
    wall_ns: int
    before: Sequence[DriverStage]
    rollout: Rollout
    after: Sequence[DriverStage]
