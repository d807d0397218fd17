"""A rollout replica: continuous batching over a KV cache, in an async Ray actor.

Requests wait until a slot of the cache is free. Requests that are admitted together are prefilled together.
Then all running requests decode one token per forward pass. Each leaves at the end of its turn. The agent
loop (`play`) holds one conversation of a replica and the calculator; many run at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope import ProfileConfig, attach, carrier, profile_step, span, trajectory, turn
from stepscope.engines import passes
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.engine_replica import weight_facts
from stepscope_report.demo.model import KVCache, Transformer, View
from stepscope_report.demo.task import Trajectory
from stepscope_report.demo.worker import Weights

if TYPE_CHECKING:
    from ray.actor import ActorHandle


SLOTS = 32


class Request:
    """One model turn: a prompt, and the tokens sampled after it."""

    def __init__(self, name: str, prompt: list[int], rng: random.Random) -> None:
        self.name = name
        self.prompt = prompt
        self.output: list[int] = []
        self.rng = rng
        self.slot = -1
        self.admitted, self.prefilled, self.finished = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def take(self, token: int) -> None:
        self.output.append(token)
        self.prefilled.set()
        if token in task.END_OF_TURN or len(self.output) == task.TURN_TOKENS:
            self.finished.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        for event in (self.admitted, self.prefilled, self.finished):
            event.set()


class RolloutReplica:
    def __init__(self, seed: int, config: ProfileConfig | None = None, replica: int = 0) -> None:
        """
        Args:
            config: The configuration of the run, for engines that need it when they are built.
        """
        torch.set_num_threads(1)
        self.seed = seed
        self.model = Transformer()
        self.cache = KVCache(SLOTS)
        self.free = list(range(SLOTS))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.serving: asyncio.Task[None] | None = None
        self.version = -1
        """Version of the weights: 0 for the first ones."""

    @profile_step(role="rollout", stage="sync_weights", attrs=weight_facts)
    async def load_weights(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)
        self.version += 1

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """Return the tokens of one turn of the model.

        Args:
            name: The name of the request. With the seed it determines the samples, for any batch.
            carried: The caller's `carrier()`: spans recorded here are children of the caller's span.
        """
        request = Request(name, prompt, random.Random(f"{self.seed} {name}"))
        self.waiting.append(request)
        if (log := passes.current()) is not None:
            log.arrive(name)
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        with attach(carried):
            with span("queue", role="rollout"):
                await request.admitted.wait()
            with span("prefill", role="rollout", attrs={"tokens": len(prompt)}):
                await request.prefilled.wait()
            with span("decode", role="rollout") as decoding:
                await request.finished.wait()
                decoding.set(tokens=len(request.output), request_id=name)
                if request.error is not None:
                    raise request.error
        return request.output

    async def shut_down(self) -> None:
        """Do nothing: this replica has no processes of its own."""

    async def _serve(self) -> None:
        """Run forward passes while there are requests, which come and go at the `sleep(0)`s."""
        try:
            while self.waiting or self.running:
                admitted = self._admit()
                await asyncio.sleep(0)
                self._prefill(admitted) if admitted else self._decode()
                await asyncio.sleep(0)
        except Exception as error:
            for request in (*self.running, *self.waiting):
                request.fail(error)  # its caller raises it
            self.waiting.clear()
            self.running.clear()
            self.free = list(range(SLOTS))

    def _admit(self) -> list[Request]:
        admitted = []
        while self.waiting and self.free:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            request.admitted.set()
            admitted.append(request)
        self.running += admitted
        return admitted

    def _prefill(self, requests: list[Request]) -> None:
        longest = max(request.length for request in requests)
        tokens = torch.tensor(
            [request.prompt + [task.PADDING] * (longest - request.length) for request in requests]
        )
        last = torch.tensor([request.length - 1 for request in requests])
        self._forward(requests, tokens, torch.arange(longest).expand_as(tokens), last)

    def _decode(self) -> None:
        tokens = torch.tensor([[request.output[-1]] for request in self.running])
        positions = torch.tensor([[request.length - 1] for request in self.running])
        self._forward(self.running, tokens, positions, torch.zeros_like(positions[:, 0]))

    @torch.inference_mode()
    def _forward(self, requests: list[Request], tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        """Run the model once and sample the next token of each request."""
        began_ns, prefills = time.monotonic_ns(), not requests[0].output
        slots = torch.tensor([request.slot for request in requests])
        logits = self.model(tokens, View(self.cache, slots, positions))[torch.arange(len(last)), last]
        draws = torch.tensor([[request.rng.random()] for request in requests])
        sampled = (logits.softmax(-1).cumsum(-1) < draws).sum(-1).clamp(max=logits.shape[-1] - 1)
        for request, token in zip(requests, sampled.tolist(), strict=True):
            request.take(token)
        if (log := passes.current()) is not None:
            log.note(
                began_ns,
                time.monotonic_ns(),
                "prefill" if prefills else "decode",
                {request.name: len(request.prompt) if prefills else 1 for request in requests},
                [1] * len(requests),
                running=len(self.running),
                waiting=len(self.waiting),
                kv_use=1 - len(self.free) / SLOTS,
                weights=self.version,
            )
        self._release()

    def _release(self) -> None:
        self.free += [request.slot for request in self.running if request.finished.is_set()]
        self.running = [request for request in self.running if not request.finished.is_set()]


async def play(
    name: str, problem: task.Problem, replica: ActorHandle[Any], calculator: Calculator, policy_version: int
) -> Trajectory:
    """Work on `problem` until the model answers, is cut off, or has used up its turns."""
    played, left = Trajectory(name, problem), problem
    played.hear("^" + left.text)
    with trajectory(name, policy_version=policy_version):
        for index in range(problem.max_turns):
            with turn(index):
                call = await _generate(played, index, replica)
                if not call.endswith(">"):
                    break
                with span("tool", role="env"):
                    result = await calculator.ask(call[1:-1])
            left = left.after(result)
            played.hear((task.REFUSED if result == task.REFUSED else "") + left.text)
        with span("compute_reward", role="reward") as scored:
            played.reward = task.reward(problem, played.turns)
            scored.set(reward=played.reward)
    return played


async def _generate(played: Trajectory, index: int, replica: ActorHandle[Any]) -> str:
    with span("generate", role="rollout") as generating:
        # With the carrier, the spans of the replica become children of this span.
        tokens = await replica.generate.remote(played.tokens, f"{played.name}-{index}", carrier())
        generating.set(tokens=len(tokens))
    return played.say(tokens)
