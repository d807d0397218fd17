"""A framework with SGLang engines in its process and in Ray actors. It does not use stepscope."""

from __future__ import annotations

from typing import Any

PROMPT = list(range(1, 9))
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


class Replica:
    """A rollout worker with an engine."""

    def __init__(self, rank: int, arguments: dict[str, Any]) -> None:
        self.rank = rank
        self.arguments = arguments

    def launch(self) -> None:
        import sglang

        self.engine = sglang.Engine(**self.arguments)

    async def generate(self) -> int:
        answer = await self.engine.async_generate(input_ids=PROMPT, sampling_params=SAMPLING)
        return len(answer["output_ids"])

    def shut_down(self) -> None:
        self.engine.shutdown()


class LocalTrainer:
    """A synchronous loop with an engine in its own process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.replica = Replica(0, arguments)
        self.replica.launch()

    def step(self) -> int:
        answer = self.replica.engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)
        return len(answer["output_ids"])


class RayTrainer:
    """A loop with an engine in a Ray actor. The framework gives the replica the number 1."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import ray

        kind: Any = ray.remote(num_cpus=0)(Replica)
        self.replicas = [kind.remote(1, arguments)]
        ray.get([replica.launch.remote() for replica in self.replicas])

    def step(self) -> int:
        import ray

        count: int = ray.get(self.replicas[0].generate.remote())
        return count
