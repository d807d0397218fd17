"""A rollout replica: continuous batching over a KV cache, in an async Ray actor.

Requests wait until a slot of the cache is free. Requests that are admitted together are prefilled together.
Then all running requests decode one token per forward pass, and each leaves at the end of its turn. The agent
loop `play` runs one conversation between a replica and the calculator; many run at once. `EngineReplica` is
the base class of replicas with real engines, which load the demo's model from disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from stepscope import ProfileConfig, attach, carrier, profile_step, span, trajectory, turn
from stepscope.engines import passes
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.model import (
    KVCache,
    Transformer,
    View,
    llama_config,
    llama_weights,
    token_log_probs,
)
from stepscope_report.demo.task import Trajectory, pad, solved
from stepscope_report.demo.worker import Weights

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from stepscope import Span


def write_checkpoint(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`. A reader sees either the old or the new weights, never a
    mixture.
    """
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(llama_config()))
    part = folder / ".part"
    named = {name: value.contiguous() for name, value in llama_weights(weights).items()}
    save_file(named, part, {"format": "pt"})
    part.rename(folder / "model.safetensors")


def warmed_up(updates: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the weights of a model after supervised updates on solved problems."""
    torch.manual_seed(seed)
    model, rng = Transformer(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(updates):
        tokens, actions = pad([solved(rng) for _ in range(32)])
        loss = -(token_log_probs(model, tokens) * actions).sum() / actions.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def weight_facts(_replica: object, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the attributes of the span in which a replica loads weights."""
    return {"bytes": sum(weight.nbytes for weight in weights.values())}


class EngineReplica(ABC):
    """Base class of replicas with an inference engine. It has the methods of `RolloutReplica`, and runs as an
    async Ray actor.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables for the engine. Variables that are already set are kept."""

    def __init__(self, seed: int, config: ProfileConfig, replica: int) -> None:
        self.config = config
        self.replica = replica
        self._seed = seed
        self._built = False
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-demo-")

    @property
    def model_path(self) -> str:
        """Folder with the model in the form of Hugging Face: `config.json` and `model.safetensors`."""
        return self._folder.name

    @profile_step(role="rollout", stage="sync_weights", attrs=weight_facts)
    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Build the engine at the first call; at later calls, reload the weights."""

        await asyncio.to_thread(write_checkpoint, Path(self.model_path), weights)
        if self._built:
            await self.reload()
        else:
            os.environ.update({name: os.environ.get(name, value) for name, value in self.environment.items()})
            self.build()
            self._built = True

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """Return the tokens of one model turn, as `RolloutReplica.generate` does."""
        seed = zlib.crc32(f"{self._seed} {name}".encode())
        with attach(carried), span("request", role="rollout") as served:
            tokens, output = await self.answer(prompt, name, seed)
            self.record(served, output)
        return tokens

    async def shut_down(self) -> None:
        if self._built:
            self.end()

    @abstractmethod
    def build(self) -> None:
        """Build the engine from the folder `model_path`, on the actor's event loop."""

    @abstractmethod
    async def reload(self) -> None:
        """Load the weights in `model_path` again, and drop caches that depend on the old weights."""

    @abstractmethod
    async def answer(self, prompt: list[int], name: str, seed: int) -> tuple[list[int], Any]:
        """Return (tokens that the model writes after `prompt`, output object of the engine).

        The tokens include the end of the turn.

        Args:
            name: Id of the request.
        """

    @abstractmethod
    def record(self, served: Span, output: Any) -> None:
        """Record on the span `served` how the engine's output splits the time of the request."""

    @abstractmethod
    def end(self) -> None:
        """Stop the engine and its processes."""


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
        """Version of the weights. The first weights have version 0."""

    @profile_step(role="rollout", stage="sync_weights", attrs=weight_facts)
    async def load_weights(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)
        self.version += 1

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """Return the tokens of one model turn.

        Args:
            name: Id of the request. Together with the seed it determines the samples, whatever the batch.
            carried: The caller's `carrier()`, so that spans recorded here are children of the caller's span.
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
        """Do nothing, because this replica has no processes of its own."""

    async def _serve(self) -> None:
        """Run forward passes while there are requests. Requests come and go during each `sleep(0)`."""
        try:
            while self.waiting or self.running:
                admitted = self._admit()
                await asyncio.sleep(0)
                self._prefill(admitted) if admitted else self._decode()
                await asyncio.sleep(0)
        except Exception as error:
            for request in (*self.running, *self.waiting):
                request.fail(error)  # raised in its caller
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
    """Work on `problem` until the model answers, is cut off, or has used all turns. Return the trajectory."""
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
