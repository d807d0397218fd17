"""Ranks that have not entered a collective which others are in, by torch's flight recorders."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.files.states import PendingCollective, ProcessGroup, ProcessState


def awaited_collective(
    state: ProcessState, states: Sequence[ProcessState]
) -> tuple[PendingCollective | None, tuple[int, ...]]:
    """Return the oldest open collective of a process, and the ranks that have not entered it.

    Args:
        states: Of all processes. Ranks that do not answer are not listed. Peers have the same role: a run may
            have several jobs of torch.distributed, whose groups have the same names.
    """
    own = state.collectives
    if own is None or not own.pending:
        return None, ()
    call = own.pending[0]
    group = next((group for group in own.groups if group.name == call.group), None)
    if group is None or call.number is None:
        return call, ()
    entered = {
        other.collectives.rank: _entered(other, group)
        for other in states
        if other.collectives is not None and other.process.role == state.process.role
    }
    return call, tuple(rank for rank in group.ranks if entered.get(rank, call.number) < call.number)


def _entered(state: ProcessState, group: ProcessGroup) -> int:
    """Return the number of the last collective of a group that a process entered; -1 for none."""
    groups = () if state.collectives is None else state.collectives.groups
    same = (other.entered for other in groups if (other.name, other.ranks) == (group.name, group.ranks))
    return next(same, -1)


def rank_of(state: ProcessState) -> int | None:
    """Return the global rank of a process."""
    return state.process.rank if state.collectives is None else state.collectives.rank
