"""What replicas of real inference engines share: the demo's Llama in a folder, loaded and loaded again."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stepscope import ProfileConfig, attach, profile_step, span

if TYPE_CHECKING:
    from torch import Tensor

    from stepscope.recording.spans.scopes import Scope


class EngineReplica(ABC):
    """Has the methods of `stepscope.demo.rollout.RolloutReplica`. Lives in an async Ray actor."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Set before the engine is built, where nobody else has set them."""

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

    @profile_step(role="rollout")
    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The first ones build the engine; later ones are loaded by the engine's own reload."""
        await asyncio.to_thread(self._write, weights)
        if self._built:
            await self.reload()
        else:
            os.environ.update({name: os.environ.get(name, value) for name, value in self.environment.items()})
            self.build()
            self._built = True

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """The tokens of one turn of the model. As `RolloutReplica.generate`."""
        seed = zlib.crc32(f"{self._seed} {name}".encode())
        with attach(carried), span("request", role="rollout") as served:
            tokens, said = await self.answer(prompt, name, seed)
            self.record(served, said)
        return tokens

    async def shut_down(self) -> None:
        if self._built:
            self.end()

    @abstractmethod
    def build(self) -> None:
        """Makes the engine of what is in `model_path`, on the actor's event loop."""

    @abstractmethod
    async def reload(self) -> None:
        """Loads what is in `model_path` now, and forgets what it has cached of the weights before."""

    @abstractmethod
    async def answer(self, prompt: list[int], name: str, seed: int) -> tuple[list[int], Any]:
        """(what the model writes after `prompt`, the end of its turn included; the engine's whole answer).

        Args:
            name: Of the request.
        """

    @abstractmethod
    def record(self, served: Scope, said: Any) -> None:
        """Says on the span of a request where, by the engine's whole answer, its time went."""

    @abstractmethod
    def end(self) -> None:
        """Ends the engine and its processes."""

    def _write(self, weights: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        from stepscope.demo import model

        folder = Path(self.model_path)
        (folder / "config.json").write_text(json.dumps(model.llama_config()))
        part = folder / ".part"
        named = {name: value.contiguous() for name, value in model.llama_weights(weights).items()}
        save_file(named, part, {"format": "pt"})
        part.rename(folder / "model.safetensors")
