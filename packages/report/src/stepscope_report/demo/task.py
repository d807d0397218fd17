"""The task of the demo: to compute a chain such as `8+5-3` with a calculator, one operation per turn.

A trajectory is one string. After a `=`, the model writes a call up to `>`, or its answer up to `.`.
Everything else is given: the first operation is the prompt, and the result of each call comes with the next
operation:

    ^8+5=<8+5>13-3=<13-3>10=10.

So if an operation is given, the model has to copy it into a call; otherwise it has to copy the result into an
answer.
Trajectories, their batches and GRPO's advantages are also here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepscope_report.demo.calculator import evaluate

VOCABULARY = " ^0123456789+-=<>.!"
PADDING = VOCABULARY.index(" ")
END_OF_TURN = frozenset(VOCABULARY.index(char) for char in ">.")
TURN_TOKENS = 8
"""Largest number of tokens in a turn. The longest correct turn is `<99+9>`."""
OPERATIONS = (1,) * 5 + (2,) * 4 + (3,) * 3 + (5, 5, 8, 12)
"""Number of operations of each problem in a step: most are short, and a few are much longer."""
REFUSED = "!"
"""The calculator's answer to an invalid call."""
EXTRA_TURNS = 2
"""Number of additional turns for calls that the calculator refuses."""
MAX_TOKENS = 6 + (max(OPERATIONS) + 1 + EXTRA_TURNS) * (TURN_TOKENS + 9)
"""Largest length of a trajectory: a prompt of at most 6 tokens, and after each turn at most 9, such as
`!-9998+9=`."""


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(char) for char in text]


def decode(tokens: Iterable[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


@dataclass(frozen=True)
class Problem:
    """The part of a chain that is not computed yet: `8 + 5 - 3` as terms."""

    terms: tuple[str, ...]

    @property
    def text(self) -> str:
        """Next prompt of the model: the next operation, or the last result."""
        return "".join(self.terms[:3]) + "="

    @property
    def max_turns(self) -> int:
        return len(self.terms) // 2 + 1 + EXTRA_TURNS

    def after(self, result: str) -> Problem:
        """Return the rest of the chain after a call with this result. A refused call leaves it unchanged."""
        return self if result == REFUSED else Problem((result, *self.terms[3:]))

    def solution(self) -> list[str]:
        """Return the turns of a perfect trajectory: each call, then the answer."""
        turns, left = [], self
        while len(left.terms) > 1:
            first, sign, second = left.terms[:3]
            turns.append(f"<{first}{sign}{second}>")
            left = left.after(str(int(first) + int(sign + second)))
        return [*turns, f"{left.terms[0]}."]


def make_problem(rng: random.Random, operations: int) -> Problem:
    """Return a random chain whose results are all in 0..99."""
    value = rng.randint(1, 9)
    terms = [str(value)]
    for _ in range(operations):
        number = rng.randint(1, 9)
        add = value < number or (value + number < 100 and rng.random() < 0.5)
        terms += ["+" if add else "-", str(number)]
        value += number if add else -number
    return Problem(tuple(terms))


def reward(problem: Problem, turns: Sequence[str]) -> float:
    """Return the share of the solution's turns that the model took in order, from 0.0 to 1.0."""
    expected, taken = problem.solution(), 0
    for turn in turns:
        if taken < len(expected) and turn == expected[taken]:
            taken += 1
    return taken / len(expected)


@dataclass
class Trajectory:
    """One attempt at one problem."""

    name: str
    problem: Problem
    tokens: list[int] = field(default_factory=list)
    actions: list[bool] = field(default_factory=list)
    """True for each token that the model wrote, False for each given token."""
    turns: list[str] = field(default_factory=list)
    reward: float = 0.0

    def hear(self, text: str) -> None:
        self._add(encode(text), action=False)

    def say(self, tokens: list[int]) -> str:
        """Add a turn of the model. Return it as text."""
        self._add(tokens, action=True)
        self.turns.append(decode(tokens))
        return self.turns[-1]

    def _add(self, tokens: list[int], *, action: bool) -> None:
        self.tokens += tokens
        self.actions += [action] * len(tokens)


@dataclass(frozen=True)
class Batch:
    """A batch of n trajectories. Tensors for predicted tokens have shape [n, time - 1]; column i belongs to
    token i + 1.
    """

    tokens: Tensor
    """Shape [n, time]."""
    actions: Tensor
    """1.0 if the model wrote the token, else 0.0."""
    advantages: Tensor
    """Shape [n, 1]."""
    old_log_probs: Tensor
    """Log-probabilities under the policy that generated the tokens."""
    ref_log_probs: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(**{tensor.name: getattr(self, tensor.name)[rows] for tensor in fields(self)})


def pad(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return the tensors `tokens` and `actions` of a `Batch`."""
    tokens = [torch.tensor(attempt.tokens) for attempt in trajectories]
    actions = [torch.tensor(attempt.actions, dtype=torch.float)[1:] for attempt in trajectories]
    return pad_sequence(tokens, True, PADDING), pad_sequence(actions, True)


def group_advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Return GRPO's advantages [n, 1]: each reward relative to the mean and spread of its group of `group`
    attempts.
    """
    grouped = torch.tensor(rewards).view(-1, group)
    spread = grouped.std(dim=1, keepdim=True) + 1e-4
    return ((grouped - grouped.mean(dim=1, keepdim=True)) / spread).view(-1, 1)


def solved(rng: random.Random) -> Trajectory:
    """Return a perfect trajectory of a random chain of 1 to 3 operations."""
    problem = make_problem(rng, rng.randint(1, 3))
    trajectory, left = Trajectory("solved", problem), problem
    trajectory.hear("^" + left.text)
    for turn in problem.solution():
        trajectory.say(encode(turn))
        if turn.endswith(">"):
            left = left.after(evaluate(turn[1:-1]))
            trajectory.hear(left.text)
    return trajectory
