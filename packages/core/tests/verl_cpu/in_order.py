"""Seeds, rewards and an order of the samples with which verl's asynchronous training is the same each time.

verl loads each by a setting of its own: `launch.IN_ORDER`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import transfer_queue
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync


def reward_of_letters(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return a reward that differs between responses, and depends on the response alone."""
    return sum(map(ord, solution_str)) % 11 / 10


class Seeded(SingleTurnAgentLoop):  # type: ignore[misc]  # verl has no types
    """An agent loop whose response depends on the weights, its prompt and its number alone."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        seed = 1000 * int(kwargs["index"]) + int(kwargs["session_id"])
        return await super().run({**sampling_params, "seed": seed}, **kwargs)


class InOrder(ReplayBufferAsync):  # type: ignore[misc]  # verl has no types
    """A buffer whose batches are in the order of the data, whichever sample was there first."""

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Set[str], batch_size: int) -> Any:
        _, kept, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        first = {uid: key for key in kept if (uid := key.split("_")[0]) in sampleable_keys}
        data = transfer_queue.kv_batch_get(
            keys=list(first.values()), partition_id=partition_id, select_fields=["index"]
        )
        place = {uid: (steps[uid], int(index)) for uid, index in zip(first, data["index"], strict=True)}
        return sorted(first, key=place.__getitem__)[:batch_size], kept, steps

    def _materialize_batch(self, partition_id: str, uids: list[str], kept: Any) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, uids, kept)

        def place(row: tuple[str, Any]) -> tuple[int, str]:
            return uids.index(row[0].split("_")[0]), row[0]

        keys, tags = zip(*sorted(zip(batch.keys, batch.tags, strict=True), key=place), strict=True)
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=list(tags))
