"""Ranks of torch.distributed (gloo) that compute and reduce, each with its torch trace: for tests of clocks.

python gloo_main.py FOLDER RANKS ROUNDS
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


def main(folder: Path, ranks: int, rounds: int) -> None:
    """Forks, so that torch is imported once; leaves `rank0.json` and so on."""
    gc.freeze()  # a rank that exits would walk, and so copy, every page of torch's objects: a second
    rank = 0
    children: list[int] = []
    for other in range(1, ranks):
        child = os.fork()
        if child == 0:
            rank, children = other, []
            break
        children.append(child)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    _record(folder / f"rank{rank}.json", rank, rounds)
    dist.destroy_process_group()
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)


def _record(path: Path, rank: int, rounds: int) -> None:
    chance = torch.Generator().manual_seed(rank)
    values = torch.ones(1000)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(rounds):
            size = int(torch.randint(20, 120, (1,), generator=chance))
            torch.rand(size, size) @ torch.rand(size, size)
            dist.all_reduce(values)
            gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, values)
            values = values / values.max()
    profiled.export_chrome_trace(str(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
