"""Ranks that are behind in collectives, by torch's own counts and by those of NCCL's RAS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from stepscope.files.states import Communicator, PendingCollective, ProcessGroup, ProcessState


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that others wait for, by the collectives that each of them has begun."""

    group: str
    """A process group of torch, or `communicator 0x5f2a` of NCCL."""
    state: Literal["behind", "dead", "silent"]
    """`behind`: it has begun fewer. `dead`, `silent`: in the judgement of NCCL."""
    op: str | None = None
    """The collective, `AllReduce`, or None for all of them."""
    begun: int | None = None
    """Number of these collectives that it has begun, or None if unknown."""
    others: int | None = None
    """The most that one of the others has begun."""


_Group: TypeAlias = tuple[str, "int | None", str, tuple[int, ...]]
"""Role and replica of a group's processes, its name, and its ranks."""


class Entered:
    """The collectives that the ranks of each role have entered, by torch's own counts.

    Peers have the same role and replica: a run may have several jobs of torch.distributed, whose groups have
    the same names. Where two processes have one rank of a group, nothing is known of that group.
    """

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self._last: dict[_Group, dict[int, int]] = defaultdict(dict)
        """{group: {rank: number of the last collective that it entered}}."""
        self._mixed: set[_Group] = set()
        """The groups of which two processes have one rank."""
        self._missing: dict[tuple[_Group, int], tuple[int, ...]] = {}
        for state in states:
            known = state.collectives
            for group in () if known is None else known.groups:
                key, rank = _group(state, group), rank_of(state) or 0
                if rank in self._last[key]:
                    self._mixed.add(key)
                self._last[key][rank] = group.entered

    def behind(self, state: ProcessState) -> Behind | None:
        """Return the group in which a process has entered the fewest collectives against the others, or
        None.
        """
        known = state.collectives
        found = []
        for group in () if known is None else known.groups:
            key = _group(state, group)
            most = max(self._last[key].values())
            if most > group.entered and key not in self._mixed:
                begun = max(0, group.entered)
                found.append(Behind(group=group.description, state="behind", begun=begun, others=most))
        return max(found, key=lambda one: (one.others or 0) - (one.begun or 0), default=None)

    def awaited(self, state: ProcessState) -> tuple[PendingCollective | None, tuple[int, ...]]:
        """Return the oldest open collective of a process, or None, and the ranks that have not entered it,
        including ranks that do not answer.
        """
        own = state.collectives
        if own is None or not own.pending:
            return None, ()
        call = own.pending[0]
        group = next((group for group in own.groups if group.name == call.group), None)
        if group is None:
            return call, ()
        if call.number is None:  # `recv 3<-0`, by ranks of the group
            sender = call.op.partition("<-")[2]
            known = call.op.startswith("recv") and sender.isdigit() and int(sender) < len(group.ranks)
            return call, (group.ranks[int(sender)],) if known else ()
        key = _group(state, group)
        if key in self._mixed:
            return call, ()
        at = key, call.number
        if at not in self._missing:
            last = self._last[key]
            self._missing[at] = tuple(rank for rank in group.ranks if last.get(rank, -1) < call.number)
        return call, self._missing[at]


def _group(state: ProcessState, group: ProcessGroup) -> _Group:
    return state.process.role, state.process.replica, group.name, group.ranks


class Launched:
    """The ranks that are behind in the communicators of NCCL, from NCCL's RAS.

    Attributes:
        behind: {process: how far it is behind}. Processes without a state have the name of a silent worker,
            or NCCL's.
        awaited: {process: the processes behind it}.
    """

    def __init__(self, states: Sequence[ProcessState], silent: Iterable[str]) -> None:
        self.behind: dict[str, Behind] = {}
        self.awaited: dict[str, set[str]] = defaultdict(set)
        self._by_pid: dict[int, list[ProcessState]] = defaultdict(list)
        for state in states:
            self._by_pid[state.process.pid].append(state)
        self._silent = list(silent)
        for state in states:
            for communicator in state.communicators:
                self._read(communicator)

    def _read(self, communicator: Communicator) -> None:
        others = [key for host, pid in communicator.others if (key := self._key(host, pid)) is not None]
        named = [self._key(rank.host, rank.pid) for rank in communicator.ranks]
        if not others and not any(named):
            return  # of another run, whose processes are on the same hosts
        group = f"communicator {communicator.hash}"
        for rank, known in zip(communicator.ranks, named, strict=True):
            key = known or f"rank {rank.rank} of {group} (pid {rank.pid} on {rank.host})"
            self.behind[key] = Behind(
                group=group,
                state=rank.state,
                op=rank.op or None,
                begun=rank.begun,
                others=rank.others,
            )
            for other in others:
                self.awaited[other].add(key)

    def _key(self, host: str, pid: int) -> str | None:
        """Return the key of a process, or of a worker without an answer. In containers, processes of several
        hosts may have one id.
        """
        there = [state for state in self._by_pid[pid] if _may_be_at(state, host)]
        known = [state.process.key for state in there]
        known = known or [key for key in self._silent if key.endswith(f"_pid{pid}")]
        return known[0] if len(known) == 1 else None


def _may_be_at(state: ProcessState, host: str) -> bool:
    """Return whether a process may run on the host with an IP address; NCCL may know but the loopback's."""
    own = state.addresses
    return not own or host in own or host == "unknown" or host.startswith(("127.", "::1"))


def rank_of(state: ProcessState) -> int | None:
    return state.process.rank if state.collectives is None else state.collectives.rank
