"""Trajectories, their advantages, and their padded tensors for the training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepscope_report.demo import task
from stepscope_report.demo.calculator import evaluate


@dataclass
class Trajectory:
    """One attempt at one problem."""

    name: str
    problem: task.Problem
    tokens: list[int] = field(default_factory=list)
    actions: list[bool] = field(default_factory=list)
    """True for each token that the model wrote."""
    turns: list[str] = field(default_factory=list)
    reward: float = 0.0

    def hear(self, text: str) -> None:
        self._add(task.encode(text), action=False)

    def say(self, tokens: list[int]) -> str:
        """Add a turn of the model and return it as text."""
        self._add(tokens, action=True)
        self.turns.append(task.decode(tokens))
        return self.turns[-1]

    def _add(self, tokens: list[int], *, action: bool) -> None:
        self.tokens += tokens
        self.actions += [action] * len(tokens)


@dataclass(frozen=True)
class Batch:
    """n trajectories. Tensors per predicted token are [n, time - 1]: column i belongs to token i + 1."""

    tokens: Tensor
    """[n, time]"""
    actions: Tensor
    """1.0 if the model wrote the token, else 0.0."""
    advantages: Tensor
    """[n, 1]"""
    old_log_probs: Tensor
    """Log-probabilities under the policy that generated the tokens."""
    ref_log_probs: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(**{tensor.name: getattr(self, tensor.name)[rows] for tensor in fields(self)})


def pad(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return `tokens` and `actions` as in a `Batch`."""
    tokens = [torch.tensor(attempt.tokens) for attempt in trajectories]
    actions = [torch.tensor(attempt.actions, dtype=torch.float)[1:] for attempt in trajectories]
    return pad_sequence(tokens, True, task.PADDING), pad_sequence(actions, True)


def group_advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Return GRPO's advantages [n, 1]: each reward against the mean and spread of its `group` attempts."""
    grouped = torch.tensor(rewards).view(-1, group)
    spread = grouped.std(dim=1, keepdim=True) + 1e-4
    return ((grouped - grouped.mean(dim=1, keepdim=True)) / spread).view(-1, 1)


def solved(rng: random.Random) -> Trajectory:
    """Return a perfect trajectory of a random chain of 1 to 3 operations."""
    problem = task.make_problem(rng, rng.randint(1, 3))
    trajectory, left = Trajectory("solved", problem), problem
    trajectory.hear("^" + left.text)
    for turn in problem.solution():
        trajectory.say(task.encode(turn))
        if turn.endswith(">"):
            left = left.after(evaluate(turn[1:-1]))
            trajectory.hear(left.text)
    return trajectory
