"""Base of replicas with real inference engines, which load the demo's Llama from disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from stepscope import ProfileConfig, attach, profile_step, span
from stepscope_report.demo.model import Transformer, llama_config, llama_weights, token_log_probs
from stepscope_report.demo.task import pad, solved

if TYPE_CHECKING:
    from torch import Tensor

    from stepscope import Span


def write_checkpoint(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`. A reader sees either the earlier weights or the new
    ones.
    """
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(llama_config()))
    part = folder / ".part"
    named = {name: value.contiguous() for name, value in llama_weights(weights).items()}
    save_file(named, part, {"format": "pt"})
    part.rename(folder / "model.safetensors")


def warmed_up(updates: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the weights of a model after supervised updates on solved chains."""
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
    """An engine with the methods of `stepscope_report.demo.rollout.RolloutReplica`, in an async Ray actor."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Variables for the environment of the engine. Those that are set already stay."""

    def __init__(self, seed: int, config: ProfileConfig, replica: int) -> None:
        self.config = config
        self.replica = replica
        self._seed = seed
        self._built = False
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-demo-")

    @property
    def model_path(self) -> str:
        """A folder as Hugging Face has them: `config.json` and `model.safetensors`."""
        return self._folder.name

    @profile_step(role="rollout", stage="sync_weights", attrs=weight_facts)
    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Build the engine with the first weights; reload it with later ones."""

        await asyncio.to_thread(write_checkpoint, Path(self.model_path), weights)
        if self._built:
            await self.reload()
        else:
            os.environ.update({name: os.environ.get(name, value) for name, value in self.environment.items()})
            self.build()
            self._built = True

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """Return the tokens of one turn of the model, as `RolloutReplica.generate` does."""
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
        """Load the weights in `model_path` again, and drop caches of the old ones."""

    @abstractmethod
    async def answer(self, prompt: list[int], name: str, seed: int) -> tuple[list[int], Any]:
        """Return the tokens that the model writes after `prompt`, and the engine's full output.

        The tokens include the end of the turn.

        Args:
            name: The name of the request.
        """

    @abstractmethod
    def record(self, served: Span, output: Any) -> None:
        """Split the time of a request on its span, according to the engine's full output."""

    @abstractmethod
    def end(self) -> None:
        """End the engine and its processes."""
