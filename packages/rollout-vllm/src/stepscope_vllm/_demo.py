"""A replica of `stepscope demo --engine vllm`: an AsyncLLM in an async Ray actor."""

from __future__ import annotations

from typing import Any

from stepscope_report.demo import task
from stepscope_report.demo.rollout import EngineReplica
from stepscope_vllm._arming.environment import engine_args
from stepscope_vllm._requests import TimedSpan, record_request


class VllmReplica(EngineReplica):
    environment = {  # noqa: RUF012  # a ClassVar of the base
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the replicas share the CPUs with the trainer and the actors
        "HF_HUB_OFFLINE": "1",
    }

    def build(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self.model_path,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            disable_log_stats=False,
            **engine_args(self.config, self.replica),
        )
        self.engine: Any = AsyncLLM.from_engine_args(arguments)

    async def reload(self) -> None:
        await self.engine.collective_rpc("reload_weights")
        await self.engine.reset_prefix_cache()

    async def answer(self, prompt: list[int], name: str, seed: int) -> tuple[list[int], Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=task.TURN_TOKENS,
            stop_token_ids=sorted(task.END_OF_TURN),
            temperature=1.0,
            seed=seed,
            detokenize=False,
        )
        last: Any = None
        async for output in self.engine.generate({"prompt_token_ids": prompt}, sampling, name):
            last = output
        return list(last.outputs[0].token_ids), last

    def record(self, served: TimedSpan, output: Any) -> None:
        record_request(served, output)

    def end(self) -> None:
        self.engine.shutdown()
