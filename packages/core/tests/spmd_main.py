"""One rank under torchrun (gloo). The ranks close step 1 one after another, and step 2 all at once.

torchrun spmd_main.py FOLDER
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

from stepscope import ProfileConfig, capture


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    config = ProfileConfig(save_path=folder, steps=[1, 2], roles={"*": {"ranks": "all"}})
    opened = capture(1, config=config).open()
    torch.ones(100) @ torch.ones(100)
    dist.barrier()
    for turn in range(dist.get_world_size()):
        if turn == rank:
            opened.close()
        dist.barrier()
    opened.result.raise_for_missing(60)
    with capture(2, config=config):
        torch.ones(100) @ torch.ones(100)
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
