"""The replica of each generation, with and without a change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from stepscope.report.whatif.changes import Changes
from stepscope.report.whatif.model import Trajectory


def assignment(
    trajectories: Sequence[Trajectory], works: Sequence[float], changes: Changes, replicas: int
) -> list[list[int]] | None:
    """Return the replica of each generation by trajectory. None: that with the fewest requests in flight.

    If only the number of replicas changes, trajectories take them in turn; single generations do if the
    measured trajectories changed theirs.

    Args:
        works: By `Call.number`: the tokens that a generation needs.
        replicas: Their number in the measured step.
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
    """Deal whole trajectories, the longest first, each to the replica that has the fewest tokens so far."""
    lengths = [sum(works[call.number] for call in played.generations()) for played in trajectories]
    loads = [0.0] * replicas
    dealt: list[list[int]] = [[] for _ in trajectories]
    for place in sorted(range(len(trajectories)), key=lambda place: -lengths[place]):
        replica = min(range(replicas), key=loads.__getitem__)
        loads[replica] += lengths[place]
        dealt[place] = [replica] * len(trajectories[place].generations())
    return dealt
