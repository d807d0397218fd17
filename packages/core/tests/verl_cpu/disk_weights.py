"""A checkpoint engine for CPUs: weights travel in files. verl loads it as `custom_backend_module`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

FOLDER = Path(os.environ["DISK_WEIGHTS"])
"""A folder that all processes see."""


@CheckpointEngineRegistry.register("disk")
class DiskEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """An engine that saves each version of the weights once."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: object) -> None:
        self.rank = 0
        FOLDER.mkdir(exist_ok=True)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, told: list[Any]) -> tuple[dict[str, Any], ...]:
        return {"rank": list(range(actors))}, {"rank": list(range(actors, actors + rollouts))}

    def init_process_group(self, rank: int, **_: object) -> None:
        self.rank = rank

    def finalize(self) -> None: ...

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        named = [(name, weight.detach().cpu().clone()) for name, weight in weights]
        if self.rank == 0:
            whole = FOLDER / f"{global_steps}.pt"
            torch.save(named, whole.with_suffix(".part"))
            whole.with_suffix(".part").rename(whole)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        whole = FOLDER / f"{global_steps}.pt"
        while not whole.exists():  # noqa: ASYNC110  # another process writes the file
            await asyncio.sleep(0.05)
        for name, weight in torch.load(whole):
            yield name, weight
