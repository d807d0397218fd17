"""Ranks of torch.distributed (gloo) that train, with a culprit in some of their steps.

python -m tests.culprits.ranks FOLDER CULPRIT RUNS
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stepscope import capture, flush, span
from tests.culprits.plan import REGULAR, SECONDS, Plan, collect, hold, sleep, slow_disk, write_file

RANKS = 4
ALL = frozenset(range(RANKS))
BATCHES = 2
"""Mini-batches of a step; after each, the ranks meet."""
TOKENS = 1000


class Plant(NamedTuple):
    """A culprit: what these ranks do in one place of the program."""

    ranks: frozenset[int]
    place: str
    act: Callable[[], None]
    tokens: int = TOKENS
    """Tokens of their mini-batches in a planted step."""


def wait(parts: int = 1) -> Callable[[], None]:
    return lambda: time.sleep(SECONDS / parts)


def nothing() -> None:
    pass


DDP_RANK = "late rank of DDP"
PLANTS = {
    "late rank": Plant(frozenset({2}), "load_batch", wait()),
    DDP_RANK: Plant(frozenset({2}), "no span", wait()),
    "slow data loader": Plant(ALL, "load_batch", wait()),
    "uneven batches": Plant(frozenset({3}), "forward", wait(BATCHES), tokens=6 * TOKENS),
    "garbage collector": Plant(frozenset({1}), "update", collect),
    "slow shared folder": Plant(ALL, "save", nothing),
    "checkpoint between steps": Plant(ALL, "between", wait()),
    "skipped collective": Plant(frozenset({1}), "reduce", nothing),
    "equal ranks": Plant(frozenset(), "", nothing),
    REGULAR: Plant(frozenset(), "", nothing),
}


class Rank:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.plant = PLANTS[plan.culprit]
        self.mine = rank in self.plant.ranks
        is_ddp = plan.culprit == DDP_RANK
        self.model = DistributedDataParallel(torch.nn.Linear(64, 64)) if is_ddp else None

    def work(self, place: str, seconds: float) -> None:
        sleep(seconds)
        if self.mine and place == self.plant.place and self.plan.now:
            with self.plan.clocked():
                self.plant.act()

    def stage(self, name: str, seconds: float, **attrs: int) -> None:
        with span(name, role="actor", attrs=attrs):
            self.work(name, seconds)

    def train(self) -> None:
        if self.plant.act is collect and self.mine:
            hold(500_000)
        for step in self.plan.each():
            self.work("between", 0.01)
            with capture(step, role="actor"):
                self.step()
        self.plan.write()

    def step(self) -> None:
        self.stage("load_batch", 0.03)
        tokens = self.plant.tokens if self.mine and self.plan.now else TOKENS
        skips = self.mine and self.plan.now and self.plant.place == "reduce"
        for batch in range(BATCHES):
            self.stage("forward", 0.05, tokens=tokens)
            if batch < BATCHES - 1 or not skips:
                dist.all_reduce(torch.ones(2))
        if self.model is not None:
            self.work("no span", 0.01)
            with span("backward", role="actor"):
                self.model(torch.ones(1, 64)).sum().backward()  # C++ code issues its collective
        if self.plan.now and self.plan.culprit == REGULAR:
            self.stage("evaluate", SECONDS)
        with self.plan.clocked() if skips else nullcontext():
            if skips:
                self.stage("dump_batch", SECONDS)
            self.stage("update", 0.05)
            with span("save", role="actor"):
                self.save()
        dist.all_reduce(torch.ones(2))
        if skips:
            dist.all_reduce(torch.ones(2))  # so that the next step begins as the others do

    def save(self) -> None:
        """Write into the run's folder, which is slow in a planted step."""
        mine = self.plant.place == "save"
        with (
            slow_disk(self.plan.folder) if mine and self.plan.now else nullcontext(),
            self.plan.clocked() if mine else nullcontext(),
        ):
            write_file(self.plan.folder / f"shard-{self.rank}")


def main(folder: Path, culprit: str, runs: int) -> None:
    """Fork the ranks, so that torch is imported once."""
    gc.collect()
    gc.freeze()  # a rank that exits would walk, and so copy, every page of torch's objects: a second
    others = list[int]()
    rank = 0
    for other in range(1, RANKS):
        child = os.fork()
        if child == 0:
            rank, others = other, []
            break
        others.append(child)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    plan = Plan(folder, culprit, runs)
    plan.configure()
    Rank(plan, rank).train()
    left = flush()
    dist.barrier()
    dist.destroy_process_group()
    statuses = [os.waitpid(child, 0)[1] for child in others]
    if left or any(statuses):
        sys.exit(f"rank {rank}: {left or statuses}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
