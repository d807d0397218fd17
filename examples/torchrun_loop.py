"""Data-parallel training on two ranks, profiled: torchrun --nproc-per-node=2 examples/torchrun_loop.py

Each rank trains on its own samples, and gloo averages the gradients. The report shows both ranks, and their
waits for each other. The lines that profile are marked `# stepscope`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepscope import capture, configure, prepare, profile_step, span  # stepscope


class Trainer:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        self.policy = DistributedDataParallel(nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-2)
        torch.manual_seed(rank + 1)  # other samples on every rank

    @profile_step(role="rollout")  # stepscope
    @torch.no_grad()
    def generate(self, states: Tensor) -> Tensor:
        logits: Tensor = self.policy.module(states)
        return logits.softmax(-1).multinomial(1)

    @profile_step(role="actor")  # stepscope
    def update_actor(self, states: Tensor, actions: Tensor, rewards: Tensor) -> None:
        log_probs = self.policy(states).log_softmax(-1).gather(1, actions)
        loss = -(log_probs * (rewards - rewards.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()  # gloo averages the gradients over the ranks meanwhile
        self.optimizer.step()

    def step(self) -> Tensor:
        """Return the mean reward of this rank."""
        states = torch.randn(512, 8)
        actions = self.generate(states)
        with span("compute_reward", role="reward"):  # stepscope
            rewards = (actions == states.argmax(dim=1, keepdim=True)).float()
        self.update_actor(states, actions, rewards)
        return rewards.mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    roles = {"*": {"ranks": "all"}}  # stepscope: trace every rank, not only rank 0
    configure(save_path="outputs/torchrun_loop", steps=[10, 20], roles=roles)  # stepscope
    prepare()  # stepscope: finds errors now, and starts the profiler once
    trainer = Trainer(rank)
    for step in range(30):
        with capture(step):  # stepscope: on every rank
            reward = trainer.step()
        dist.all_reduce(reward)
        if rank == 0:
            print(f"step {step}: mean reward {reward.item() / ranks:.3f}", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print("See where the steps went: stepscope report outputs/torchrun_loop")


if __name__ == "__main__":
    main()
