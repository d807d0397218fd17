"""The training side of the demo: actor workers that train one model together, and a reference worker.

The classes are plain Python. The trainer makes Ray actors of them. `profile_step` marks the methods that are
stages of a step.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not to mypy
from torch.nn.parallel import DistributedDataParallel

from stepscope import advance, profile_step
from stepscope_report.demo.model import Transformer, token_log_probs
from stepscope_report.demo.task import Batch, pad, solved

WARM_UP_RATE = 3e-3
LEARNING_RATE = 1e-3
MINI_BATCHES = 4
CLIP = 0.2
KL_WEIGHT = 0.01

Weights = dict[str, Tensor]


class ActorWorker:
    """One rank of the policy's data-parallel training."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)  # the same first weights on every rank
        self.rank, self.world_size = rank, world_size
        self.rng = random.Random(f"{seed} {rank}")
        self.model = Transformer()

    def serve(self) -> int:
        """Open the store through which the ranks find each other, on rank 0. Return its port, which the
        system chose.
        """
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def join(self, port: int) -> None:
        store = self.store if self.rank == 0 else TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        self.policy = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=WARM_UP_RATE, weight_decay=0.0)

    def warm_up(self, updates: int, batch_size: int = 32) -> float:
        """Run supervised updates on solved problems, so that GRPO gets rewards. Return the last loss."""
        loss = torch.zeros(())
        for _ in range(updates):
            tokens, actions = pad([solved(self.rng) for _ in range(batch_size)])
            loss = -(token_log_probs(self.policy, tokens) * actions).sum() / actions.sum()
            self._descend(loss)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return loss.item()

    @profile_step(role="actor", attrs=lambda self, tokens: {"tokens": tokens.numel()})
    def compute_log_prob(self, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return token_log_probs(self.model, tokens)

    @profile_step(role="actor", attrs=lambda self, batch: {"tokens": batch.tokens.numel()})
    def update_actor(self, batch: Batch) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index in range(MINI_BATCHES):
            loss, metrics = grpo_loss(self.policy, batch[index::MINI_BATCHES], self.world_size)
            self._descend(loss)
            advance()  # the mini-batch is done: a torch.profiler schedule, if configured, moves on
        return metrics

    @profile_step(role="actor")
    def sync_weights(self) -> Weights:
        """Return the policy's weights for the replicas."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch; gloo averages the gradients over the ranks meanwhile
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()


class ReferenceWorker:
    """The policy as it was before reinforcement learning."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = Transformer()

    def load_weights(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)

    @profile_step(role="ref", attrs=lambda self, tokens: {"tokens": tokens.numel()})
    def compute_ref_log_prob(self, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return token_log_probs(self.model, tokens)


def grpo_loss(policy: nn.Module, batch: Batch, world_size: int) -> tuple[Tensor, dict[str, float]]:
    """Return PPO's clipped loss with the group's advantages, and the KL divergence to the reference
    (estimator k3).
    """
    log_probs = token_log_probs(policy, batch.tokens) * batch.actions
    ratio = (log_probs - batch.old_log_probs * batch.actions).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    objective = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    away = batch.ref_log_probs * batch.actions - log_probs
    kl = away.exp() - away - 1
    # Gradients are averaged over ranks. So are token counts, to give a token the same weight on each rank.
    tokens = batch.actions.sum()
    dist.all_reduce(tokens)
    per_token = batch.actions / (tokens / world_size)
    loss = ((KL_WEIGHT * kl - objective) * per_token).sum()
    return loss, {"loss": loss.item(), "kl": (kl * per_token).sum().item()}
