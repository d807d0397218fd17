"""torchrun same_training.py FOLDER: the example for torchrun, with rewards that time out.

Each rank writes what its training ends with.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from examples.torchrun_loop import Trainer
from packages.core.tests import timed_rewards
from stepscope import capture, prepare, profile_step

STEPS = 4
timed_rewards.judge = profile_step(role="reward")(timed_rewards.judge)
timed_rewards.compare = profile_step(role="reward")(timed_rewards.compare)


class TimedTrainer(Trainer):
    """The example's trainer, whose rewards are numbers of `timed_rewards` too."""

    def update_actor(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        texts = [str(int(action)) for action in actions[:4]]
        super().update_actor(states, actions, rewards + sum(timed_rewards.rewards(texts)))


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prepare()
    trainer = TimedTrainer(rank)
    rewards = []
    for step in range(STEPS):
        with capture(step):
            rewards.append(trainer.step().item())
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.policy.state_dict().values())
    ended = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "rewards": rewards,
        "reached": timed_rewards.reached,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(ended))
    dist.barrier()  # without it, gloo aborts one exit in ten, stepscope or not
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
