"""A replica of `stepscope demo --engine sglang`: an `sglang.Engine` in an async Ray actor."""

from __future__ import annotations

from typing import Any

from stepscope_report.demo import task
from stepscope_report.demo.rollout import EngineReplica
from stepscope_sglang._requests import TimedSpan, record_request


class SglangReplica(EngineReplica):
    environment = {  # noqa: RUF012  # a ClassVar of the base
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the replicas share the CPUs with the trainer and the actors
    }

    def build(self) -> None:
        import sglang

        self.engine: Any = sglang.Engine(
            model_path=self.model_path,
            # SGLang's own Llama needs a kernel for rotary positions that may not exist for this CPU.
            model_impl="transformers",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            context_length=512,
            max_running_requests=32,
            max_total_tokens=32 * 512,
            sleep_on_idle=True,
            enable_metrics=True,
            log_level="error",
        )

    async def reload(self) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        # `Engine.update_weights_from_disk` would fail here: it runs the event loop, which already runs.
        wanted = UpdateWeightFromDiskReqInput(model_path=self.model_path)
        done, why, *_ = await self.engine.tokenizer_manager.update_weights_from_disk(wanted, None)
        if not done:
            raise RuntimeError(f"SGLang did not load the new weights: {why}")

    async def answer(self, prompt: list[int], name: str, seed: int) -> tuple[list[int], Any]:
        # `seed` is not passed. SGLang uses a seed only for deterministic inference, with other kernels.
        sampling = {
            "max_new_tokens": task.TURN_TOKENS,
            "stop_token_ids": sorted(task.END_OF_TURN),
            "temperature": 1.0,
        }
        answer = await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=name)
        return answer["output_ids"], answer

    def record(self, served: TimedSpan, output: Any) -> None:
        record_request(served, output)

    def end(self) -> None:
        self.engine.shutdown()
