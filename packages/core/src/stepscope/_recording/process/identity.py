"""Identity of this process: role, rank, host. A rank that nothing states is None."""

from __future__ import annotations

import os
import socket
import sys

from stepscope.files.sidecar import ProcessInfo


def identify(
    role: str,
    *,
    rank: int | None = None,
    position: int | None = None,
    world_size: int | None = None,
    actor_id: str | None = None,
    replica: int | None = None,
) -> ProcessInfo:
    """Return this process. Its rank is the first known one of `rank`, STEPSCOPE_RANK, torch.distributed, RANK
    and `position`, else None.
    """
    number, size, source = _rank(rank, position)
    return ProcessInfo(
        role=role,
        rank=number,
        world_size=size if size is not None else world_size,
        rank_source=source,
        host=socket.gethostname(),
        pid=os.getpid(),
        actor_id=actor_id,
        replica=replica,
    )


def _rank(rank: int | None, position: int | None) -> tuple[int | None, int | None, str | None]:
    if rank is not None:
        return rank, None, "argument"
    stated = _integer("STEPSCOPE_RANK")
    if stated is not None:
        return stated, None, "environment"
    distributed = _torch_distributed()
    if distributed is not None:
        return (*distributed, "torch.distributed")
    launched = _integer("RANK")
    if launched is not None:
        return launched, _integer("WORLD_SIZE"), "environment"
    return position, None, None if position is None else "position"


def is_alone() -> bool:
    """Return whether no other process of a torch.distributed group runs the same loop."""
    distributed = _torch_distributed()
    return distributed is None or distributed[1] == 1


def place() -> tuple[int, int]:
    """Return this process' rank among the processes that a launcher started with the same program, and their
    number.

    (0, 1) for a program that runs alone. If an engine in this process started torch.distributed as a group of
    one, the launcher's variables count.
    """
    distributed = _torch_distributed()
    if distributed is not None and distributed[1] > 1:
        return distributed
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    return (0, 1) if rank is None or size is None else (rank, size)


def _torch_distributed() -> tuple[int, int] | None:
    # Only when the process already uses it: importing torch here would cost a second.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _integer(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def in_ray_worker() -> bool:
    """Return whether Ray started this process for its tasks and actors."""
    return os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"


def is_first() -> bool:
    """Return whether this process logs messages that concern every process of its run: the main one, or rank
    0.
    """
    rank = os.environ.get("RANK")
    if rank is not None:
        return rank == "0"
    multiprocessing = sys.modules.get("multiprocessing")  # a child of it has imported it
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return not (is_child or in_ray_worker())
