"""The cost of noting forward passes in vLLM's engine core, without a profiler.

CPU of the engine core's thread for each pass, by the number of requests in it: calls of the real hooks around
a scheduler that does nothing, against calls of that scheduler alone, in turns. Needs no vLLM.

`--vllm` measures tokens per second of a real vLLM in this process too, with its passes noted and without, in
turns and without a profiler, and the bytes of the file. Run it with the Python of an environment that has
vLLM: `dev.py test --engines vllm-0.32.0` makes one. A busy machine hides what it measures.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _measure import header, interleaved, parser, ratio_interval, table, verdict

ROUNDS = 15
PASS_MS = 10
"""Duration of a decode pass that a cost is compared with. Large models take longer."""


class Scheduler:
    """The calls of a scheduler that are hooked, with as many requests in each pass."""

    def __init__(self, requests: int) -> None:
        ids = [f"request-{number}-{number:08x}" for number in range(requests)]
        self.output = SimpleNamespace(
            total_num_scheduled_tokens=requests, num_scheduled_tokens=dict.fromkeys(ids, 1),
            scheduled_spec_decode_tokens={}, scheduled_new_reqs=[], preempted_req_ids=None,
        )  # fmt: skip
        answers = [SimpleNamespace(request_id=name, new_token_ids=[1]) for name in ids]
        self.results = {0: SimpleNamespace(outputs=answers)}

    def schedule(self) -> Any:
        return self.output

    def update_from_output(self, _: Any) -> Any:
        return self.results

    def add_request(self, _: Any) -> None: ...

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.results[0].outputs), 0

    def get_kv_cache_usage(self) -> float:
        return 0.5


class Core:
    """The part of an engine core that is hooked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0))

    def preprocess_add_request(self, _: Any) -> None: ...


def us_of_a_pass(requests: int) -> float:
    """Return the CPU of the hooks for one pass, in us."""
    from stepscope_vllm._engine_side import passes

    scheduler = Scheduler(requests)
    core = Core(scheduler)

    def us(passes_run: int = 400) -> float:
        began_ns = time.thread_time_ns()
        for _ in range(passes_run):
            scheduler.update_from_output(scheduler.schedule())
        return (time.thread_time_ns() - began_ns) / 1e3 / passes_run

    costs = []
    for _ in range(ROUNDS):
        plain = us()
        passes.begin(core, 100_000)
        costs.append(us() - plain)
        passes.end(core)
    return statistics.median(costs)


TOKENS, REQUESTS, TURNS = 64, 64, 31
OFF, ON = "passes off", "passes on"


def tokens_per_s(turns: int) -> tuple[dict[str, list[float]], int, int]:
    """Return the tokens per second of each turn by contender, and the bytes and rows of the last file."""
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm_capture import write_model

    from stepscope.files.passes import unpacked
    from stepscope_report.demo.model import Transformer, llama_config, llama_weights
    from stepscope_vllm._engine_side import passes

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), llama_config(), llama_weights(Transformer().state_dict()))
        llm = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=256,
            max_num_seqs=REQUESTS, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
        )  # fmt: skip
    core: Any = llm.llm_engine.engine_core
    core = core.engine_core
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4 + number % 8]} for number in range(REQUESTS)]
    contents: list[bytes] = []

    def plain() -> float:
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return TOKENS * REQUESTS / (time.perf_counter() - began)

    def noted() -> float:
        passes.begin(core, 100_000)
        try:
            return plain()
        finally:
            contents.append(passes.end(core) or b"")

    results = interleaved({OFF: plain, ON: noted}, turns)
    rows = len(unpacked(contents[-1]).served.request)
    return results, len(contents[-1]), rows


def with_vllm(turns: int) -> None:
    results, size, rows = tokens_per_s(turns)
    medians = {name: statistics.median(values) for name, values in results.items()}
    ratio, low, high = ratio_interval(results[ON], results[OFF])
    table(
        ("vLLM", "tokens/s", "/ off", "at least", "at most"),
        (
            (OFF, f"{medians[OFF]:.0f}", "1.000x", "", ""),
            (ON, f"{medians[ON]:.0f}", f"{ratio:.3f}x", f"{low:.3f}x", f"{high:.3f}x"),
        ),
    )
    verdict("tokens per second with passes against without", ratio, 0.99, "x", at_least=True)
    verdict(f"file of {rows} requests in passes, bytes of each", size / rows, 40, "")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--vllm", action="store_true", help="also tokens per second of a real vLLM")
    options = made.parse_args()
    costs = {requests: us_of_a_pass(requests) for requests in (1, 32, 256)}
    header("passes", "stepscope-rollout-vllm")
    print("  requests in a pass  " + "".join(f"{requests:>8}" for requests in costs))
    print("  us of CPU           " + "".join(f"{us:>8.1f}" for us in costs.values()) + "\n")
    verdict(f"notes of 256 requests, of a pass of {PASS_MS} ms", costs[256] / PASS_MS / 10, 1, " %")
    if options.vllm:
        with_vllm(TURNS // 10 if options.quick else TURNS)


if __name__ == "__main__":
    main()
