"""`python sync_weights.py`: verl's own manager of checkpoint engines sends weights to a replica, four times.

The engine sends nothing; verl's calls around it are real. Prints what each caller got, and what the replica
did.
"""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry

import stepscope


@CheckpointEngineRegistry.register("nothing")
class Nothing:
    """An engine that sends nothing."""

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, told: list[object]) -> tuple[dict[str, Any], ...]:
        return {"rank": [0] * actors}, {"rank": [1] * rollouts}


@ray.remote
class Worker:
    """A worker of the trainer or of the replica."""

    def execute_checkpoint_engine(self, method: str, **_: object) -> str:
        return method

    async def update_weights(self, global_steps: int | None = None, **_: object) -> dict[str, Any]:
        return {"version": global_steps}


class Actors:
    """The trainer's worker group, as the manager needs it."""

    world_size = 1

    def __init__(self) -> None:
        self.worker = Worker.remote()  # type: ignore[attr-defined]  # Ray has made an actor of the class

    def execute_checkpoint_engine(self, method: list[str], **_: object) -> list[Any]:
        return [self.worker.execute_checkpoint_engine.remote(method[0])]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        return [self.worker.update_weights.remote(global_steps)]


class Replica:
    """A replica of the rollout that notes what it is asked for."""

    def __init__(self) -> None:
        self.workers = [Worker.remote()]  # type: ignore[attr-defined]  # as above
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def asked(**_: object) -> None:
            await asyncio.sleep(0)
            self.asked.append(name)

        return asked


async def awaited(manager: Any) -> object:
    async with stepscope.capture(2):
        return await manager.update_weights(global_steps=2)


async def blocking(manager: Any) -> object:
    call = functools.partial(manager.update_weights, global_steps=3)
    return (lambda: call())()


def main() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    replica = Replica()
    manager = CheckpointEngineManager(
        SimpleNamespace(backend="nothing", custom_backend_module=None), Actors(), [replica]
    )
    with stepscope.capture(1):
        print(manager.update_weights(global_steps=1))
    print(asyncio.run(awaited(manager)))
    print(asyncio.run(blocking(manager)))
    manager.sleep_replicas()
    print(" ".join(replica.asked))


if __name__ == "__main__":
    main()
