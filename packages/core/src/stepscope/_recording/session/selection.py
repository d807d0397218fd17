"""Selection of the processes that a profiler records.

Except for `library_loaded`, the functions depend only on their arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from stepscope.config import ProfileConfig, RoleConfig
from stepscope.files.sidecar import ProcessInfo

LIBRARY = {"torch": "torch", "cuda_memory": "torch", "npu": "torch_npu"}
"""{tool: library whose work the tool records}. In a process without the library, there is nothing to
record."""


def library_loaded(tool: str) -> bool:
    """Return whether this process has imported the library whose work `tool` records. For `npu`, also return
    True if torch is imported and torch_npu is not installed, so that the backend reports this error.
    """
    if tool not in LIBRARY or LIBRARY[tool] in sys.modules:
        return True
    if tool != "npu" or "torch" not in sys.modules:
        return False
    return find_spec("torch_npu") is None


def is_installed(tool: str) -> bool:
    """Return whether the library whose work `tool` records can be imported here."""
    return library_loaded(tool) or find_spec(LIBRARY[tool]) is not None


class Decision(NamedTuple):
    """Decision whether a profiler records a process in a captured step. Spans are always recorded."""

    record: bool
    """True if the profiler records the process."""
    reason: str
    """Reason for `record`, for the manifest."""


def decide(config: ProfileConfig, *, role: str, rank: int | None, world_size: int | None = None) -> Decision:
    """Decide whether the profiler records a process with `role` and `rank` (None if unknown).

    `first` selects rank 0, and also a process of unknown rank, which may be rank 0. With a world size of 1,
    an unknown rank is 0.
    """
    match = config.role(role)
    if match is None:
        return Decision(False, f"no pattern in roles matches role {role!r}")
    pattern, settings = match
    if not settings.profiler:
        return Decision(False, f"roles.{pattern}.profiler is off")
    if rank is None and world_size == 1:
        rank = 0
    return _by_rank(f"roles.{pattern}", settings, rank)


def decide_process(
    config: ProfileConfig, *, roles: Sequence[str], rank: int | None, world_size: int | None = None
) -> Decision:
    """Decide for a process that has several roles. The profiler records the process if one of its roles is
    selected.
    """
    decisions = {role: decide(config, role=role, rank=rank, world_size=world_size) for role in roles}
    if len(decisions) == 1:
        return decisions[roles[0]]
    selected = [
        f"role {role!r}: {decision.reason}" for role, decision in decisions.items() if decision.record
    ]
    refused = dict.fromkeys(decision.reason for decision in decisions.values())
    return Decision(bool(selected), "; ".join(selected or refused))


def may_record(config: ProfileConfig, decision: Decision) -> bool:
    """Return whether the profiler may run in a process. In discrete mode, the role of each stage decides
    later.
    """
    by_stage = config.mode == "discrete" and any(role.profiler for role in config.roles.values())
    return decision.record or by_stage


def unreachable_ranks(config: ProfileConfig, role: str, world_size: int) -> tuple[int, ...]:
    """Return the selected ranks that a role with `world_size` processes does not have, in ascending order."""
    match = config.role(role)
    ranks = match[1].ranks if match and match[1].profiler else ()
    return () if isinstance(ranks, str) else tuple(sorted(rank for rank in ranks if rank >= world_size))


def missing_ranks(config: ProfileConfig, process: ProcessInfo) -> dict[str, str]:
    """Return {name: reason} of the selected ranks that no process has. Only rank 0 reports them."""
    if process.rank != 0 or process.world_size is None:
        return {}
    reason = f"no such rank: world_size is {process.world_size}"
    ranks = unreachable_ranks(config, process.role, process.world_size)
    return {f"{process.role} rank {rank}": reason for rank in ranks}


def is_shared(config: ProfileConfig, role: str) -> bool:
    """Return whether the pattern that matches `role` may match other roles too, which may have more ranks."""
    match = config.role(role)
    return match is not None and match[0] != role


def unreachable_in_engines(
    config: ProfileConfig, role: str, sizes: Sequence[tuple[int, int | None]]
) -> dict[int, str]:
    """Return {rank: reason} of the selected ranks that no engine has.

    Args:
        sizes: (number, world size) of each engine. An engine of unknown size (None) may have any rank.
    """
    match = config.role(role)
    ranks = match[1].ranks if match else ()
    ends = [(number + 1) * size for number, size in sizes if size is not None]
    if isinstance(ranks, str) or len(ends) < len(sizes) or not ends:
        return {}
    reason = f"no such rank: the engines given have ranks up to {max(ends) - 1}"
    return {rank: reason for rank in ranks if rank >= max(ends)}


def _by_rank(at: str, role: RoleConfig, rank: int | None) -> Decision:
    if role.ranks == "all":
        return Decision(True, f"{at} selects all ranks")
    if role.ranks == "first" and rank is None:
        return Decision(True, f"{at} selects the first rank; the rank is unknown, so this may be it")
    if role.ranks == "first":
        return Decision(rank == 0, f"{at} selects the first rank and this is rank {rank}")
    if rank is None:
        return Decision(False, f"rank is unknown and {at}.ranks asks for {list(role.ranks)}")
    listed = rank in role.ranks
    return Decision(listed, f"rank {rank} is {'in' if listed else 'not in'} {at}.ranks {list(role.ranks)}")
