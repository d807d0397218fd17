"""A replica of `stepscope demo --engine vllm`: an AsyncLLM in an async Ray actor."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope import ProfileConfig, attach, profile_step, span
from stepscope.demo import task
from stepscope_vllm._args import engine_args
from stepscope_vllm._facts import record_request

if TYPE_CHECKING:
    from torch import Tensor

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the replicas share the machine with the rest of the demo
    "HF_HUB_OFFLINE": "1",
}


class VllmReplica:
    """Has the methods of `stepscope.demo.rollout.RolloutReplica`."""

    engine_name = "vllm"

    def __init__(self, seed: int, config: ProfileConfig, replica: int) -> None:
        self._seed = seed
        self._config = config
        self._replica = replica
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-demo-")
        self.engine: Any = None

    @profile_step(role="rollout")
    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The first ones build the engine; later ones are loaded by vLLM's own reload."""
        await asyncio.to_thread(self._write, weights)
        if self.engine is None:
            self._build()
        else:
            await self.engine.collective_rpc("reload_weights")
            await self.engine.reset_prefix_cache()

    async def generate(self, prompt: list[int], name: str, carried: Mapping[str, object] | None) -> list[int]:
        """The tokens of one turn of the model. As `RolloutReplica.generate`."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=task.TURN_TOKENS,
            stop_token_ids=sorted(task.END_OF_TURN),
            temperature=1.0,
            seed=zlib.crc32(f"{self._seed} {name}".encode()),
            detokenize=False,
        )
        outputs = self.engine.generate({"prompt_token_ids": prompt}, sampling, name)
        last: Any = None
        with attach(carried), span("request", role="rollout") as served:
            async for output in outputs:
                last = output
            tokens = list(last.outputs[0].token_ids)
            record_request(served, last)
        return tokens

    async def shut_down(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def _build(self) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self._folder.name,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            disable_log_stats=False,
            **engine_args(self._config, self._replica),
        )
        self.engine = AsyncLLM.from_engine_args(arguments)

    def _write(self, weights: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        from stepscope.demo import model

        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(model.llama_config()))
        part = folder / ".part"
        named = {name: value.contiguous() for name, value in model.llama_weights(weights).items()}
        save_file(named, part, {"format": "pt"})
        part.rename(folder / "model.safetensors")
