"""Tokens per second of a real vLLM engine with its forward passes noted, against without. No profiler runs.

The engine lives in this process and its model is tiny, so that a pass takes milliseconds: on a real model, of
which a pass takes 10 ms and more, the cost of a note is a smaller part. Rounds with and without notes take
turns. Needs an environment with vLLM: `dev.py test --engines vllm-0.32.0` makes one, whose Python runs this.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import header, verdict

ROUNDS, REQUESTS, TOKENS = 15, 128, 32


def main() -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    from stepscope.files.passes import unpacked
    from stepscope_report.demo.engine_replica import write_checkpoint
    from stepscope_report.demo.model import Transformer
    from stepscope_vllm._engine_side import passes, plugin

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), Transformer().state_dict())
        sizes: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20}
        llm = LLM(model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **sizes)
        plugin.load()
        core: Any = llm.llm_engine.engine_core.engine_core
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4]}] * REQUESTS

        def tokens_per_s(noted: bool) -> float:
            if noted:
                passes.begin(core, 100_000)
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            took = time.perf_counter() - began
            content = passes.end(core)
            if content is not None:
                file = unpacked(content)
                assert sum(file.served.output) == REQUESTS * TOKENS
                sizes["bytes"], sizes["passes"] = (
                    len(content) / len(file.served.output),
                    len(file.passes.number),
                )
            return REQUESTS * TOKENS / took

        tokens_per_s(True)
        tokens_per_s(False)
        pairs = [
            (tokens_per_s(True), tokens_per_s(False))
            if at % 2
            else (tokens_per_s(False), tokens_per_s(True))[::-1]
            for at in range(ROUNDS)
        ]
    ratios = sorted(noted / plain for noted, plain in pairs)
    noted, plain = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
    header("passes", "vllm")
    pass_ms = REQUESTS * 1e3 / plain
    print(f"  {REQUESTS} requests, {TOKENS} tokens, {sizes['passes']} passes of {pass_ms:.1f} ms")
    print(f"  tokens/s with notes {noted:,.0f}, without {plain:,.0f}")
    print(f"  ratios {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"  {sizes['bytes']:.1f} bytes a request and pass")
    verdict("tokens per second with passes noted", statistics.median(ratios), 0.99, "x", at_least=True)


if __name__ == "__main__":
    main()
