"""GRPO on Ray with multi-turn rollouts, profiled: python examples/grpo_ray.py

Copy the lines marked `# stepscope` into your own trainer. The model, the task and the inference engine come
from `stepscope_report.demo`, and are small enough to read.
"""

import asyncio
import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stepscope import capture, carrier, configure, profile_step, span, trajectory, turn  # stepscope
from stepscope.engines.ray import RayRollout  # stepscope
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.model import Transformer, token_log_probs
from stepscope_report.demo.rollout import RolloutReplica
from stepscope_report.demo.task import Batch, Trajectory, group_advantages, pad, solved
from stepscope_report.demo.worker import Weights, grpo_loss

STEPS, RANKS, REPLICAS, GROUP = 4, 2, 2, 8


class Actor:
    def __init__(self, rank: int, rendezvous: str) -> None:
        torch.manual_seed(0)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
        self.policy = DistributedDataParallel(Transformer())
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=2e-3, weight_decay=0.0)

    def descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)  # gloo averages the gradients over the ranks meanwhile
        self.optimizer.step()

    def warm_up(self, updates: int, rng: random.Random) -> None:
        for _ in range(updates):
            tokens, actions = pad([solved(rng) for _ in range(32)])
            self.descend(-(token_log_probs(self.policy, tokens) * actions).sum() / actions.sum())
        self.frozen = copy.deepcopy(self.policy.module)

    @profile_step(role="actor")  # stepscope
    def compute_log_prob(self, tokens: Tensor) -> Tensor:
        return token_log_probs(self.policy.module, tokens)

    @profile_step(role="ref")  # stepscope
    def compute_ref_log_prob(self, tokens: Tensor) -> Tensor:
        return token_log_probs(self.frozen, tokens)

    @profile_step(role="actor")  # stepscope
    def update_actor(self, batch: Batch) -> None:
        for part in (batch[0::2], batch[1::2]):
            self.descend(grpo_loss(self.policy, part, RANKS)[0])

    @profile_step(role="actor")  # stepscope
    def sync_weights(self) -> Weights:
        return dict(self.policy.module.state_dict())

    def train(self, tokens: Tensor, actions: Tensor, advantages: Tensor) -> None:
        with torch.inference_mode():
            old, ref = self.compute_log_prob(tokens), self.compute_ref_log_prob(tokens)
        self.update_actor(Batch(tokens, actions, advantages, old, ref))


async def play(name: str, problem: task.Problem, replica: Any, calculator: Calculator) -> Trajectory:
    played, left = Trajectory(name, problem), problem
    played.hear("^" + left.text)
    with trajectory(name):  # stepscope
        for index in range(problem.max_turns):
            with turn(index):  # stepscope
                with span("generate", role="rollout"):  # stepscope: the carrier takes this span along
                    tokens = await replica.generate.remote(played.tokens, f"{name}-{index}", carrier())
                if not (call := played.say(tokens)).endswith(">"):
                    break
                with span("tool", role="env"):  # stepscope
                    left = left.after(await calculator.ask(call[1:-1]))
                played.hear(left.text)
    played.reward = task.reward(problem, played.turns)
    return played


async def main(rendezvous: str) -> None:
    actors: list[Any] = [ray.remote(Actor).remote(rank, rendezvous) for rank in range(RANKS)]
    replicas: list[Any] = [ray.remote(RolloutReplica).remote(seed=0) for _ in range(REPLICAS)]
    engines = [RayRollout(replica) for replica in replicas]  # stepscope
    await asyncio.gather(*(a.warm_up.remote(50, random.Random(i)) for i, a in enumerate(actors)))
    rng = random.Random(0)
    async with Calculator() as calculator:
        for step in range(STEPS):
            async with capture(step, workers={"actor": actors}, engines=engines):  # stepscope
                weights = actors[0].sync_weights.remote()
                await asyncio.gather(*(replica.load_weights.remote(weights) for replica in replicas))
                problems = [task.make_problem(rng, operations) for operations in task.OPERATIONS]
                attempts = [(i, n, problem) for i, problem in enumerate(problems) for n in range(GROUP)]
                played = await asyncio.gather(
                    *(play(f"{step}-{i}-{n}", p, replicas[n % REPLICAS], calculator) for i, n, p in attempts)
                )
                rewards = [game.reward for game in played]
                data = (*pad(played), group_advantages(rewards, GROUP))
                shards = ([part[rank::RANKS] for part in data] for rank in range(RANKS))
                await asyncio.gather(*(a.train.remote(*s) for a, s in zip(actors, shards, strict=True)))
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.2f}")


if __name__ == "__main__":
    roles = {"actor": {"ranks": "all"}, "rollout": {"ranks": "all"}}  # stepscope
    configure(save_path=Path("outputs/grpo_ray").resolve(), steps=[1, 3], roles=roles)  # stepscope
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"file://{folder}/ranks"))
    print("See where the steps went: stepscope report outputs/grpo_ray")
