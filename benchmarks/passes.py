"""Cost of recording forward passes in vLLM's engine core, without a profiler.

Three costs are measured, without vLLM:
* the CPU of the engine core's thread for each pass, by the number of requests: the real hooks around a
  scheduler that does nothing, and this scheduler alone, take turns
* the median and the largest CPU of a pass in the flight recorder, if each request takes part in 500 passes
* the CPU of the engine core's thread for a copy of all passes that the recorder keeps (64 MB)

`--vllm` also measures a real vLLM in this process: its tokens per second with passes recorded and not, in
turns, the CPU of the hooks, and the size of the file. There is a tiny model, and a larger model whose passes
take about as long as passes of real models on GPUs. Run this with the Python of an environment with vLLM;
`dev.py test --engines vllm-0.32.0` makes one. The tokens per second need an idle machine. The hooks' CPU
is valid on a busy machine, too, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _measure import header, interleaved, parser, ratio_interval, table, verdict

ROUNDS = 15
PASS_MS = 10
"""Duration of a decode pass with which costs are compared. Large models take longer."""


class Scheduler:
    """Stand-in for a scheduler, with the hooked methods and the given number of requests in each pass."""

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
    """Stand-in for an engine core, with the attributes that the hooks use."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0))

    def preprocess_add_request(self, _: Any) -> None: ...


def us_of_a_pass(requests: int) -> float:
    """Return the us of CPU of the hooks for one pass."""
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


def us_of_notes(requests: int, number: int) -> list[float]:
    """Return the us of CPU for each of `number` passes in the flight recorder, sorted."""
    from stepscope.engines.passes import PassRing

    gc.disable()  # the cost of a collection depends on the other objects of this program
    ring, batch, costs = PassRing(64), dict.fromkeys(map(str, range(requests)), 1), []
    for at in range(number):
        for new in range(at * requests // 500, (at + 1) * requests // 500):
            del batch[str(new)]
            ring.arrive(str(new + requests), caller_id=f"turn {new}")
            batch[str(new + requests)] = 1
        output, now_ns, began_ns = [1] * requests, time.monotonic_ns(), time.thread_time_ns()
        ring.note(now_ns, now_ns, "decode", batch, output, running=requests, waiting=0)
        costs.append((time.thread_time_ns() - began_ns) / 1e3)
    gc.enable()
    return sorted(costs)


def ms_of_reading() -> tuple[float, float]:
    """Return ms of CPU for a copy of a full ring, and for the encoding of its file."""
    from stepscope.engines import passes

    ring, batch = passes.PassRing(64), {str(number): 1 for number in range(256)}
    for at in range(30_000):
        ring.note(at, at + 1, "decode", batch, [1] * 256, running=256, waiting=0)

    def ms(read: Callable[[], object]) -> float:
        began_ns = time.thread_time_ns()
        read()
        return (time.thread_time_ns() - began_ns) / 1e6

    copies = [ms(lambda: ring.copy().packed()) for _ in range(5)]
    return statistics.median(copies), ms(lambda: passes.encoded(ring.file()))


TOKENS, REQUESTS = 64, 64
TURNS = {"tiny model": 31, "larger model": 15}
LARGER = {
    "vocab_size": 2048, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64,
}  # fmt: skip
OFF, ON = "passes off", "passes on"


class Engine:
    """A vLLM engine in this process that generates with and without recorded passes."""

    def __init__(self, name: str) -> None:
        os.environ.update(
            VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )  # fmt: skip
        from vllm import LLM, SamplingParams
        from vllm_capture import write_model

        from stepscope_report.demo.model import Transformer, llama_config, llama_weights

        config = llama_config() | (LARGER if name == "larger model" else {})
        with tempfile.TemporaryDirectory() as folder:
            weights = llama_weights(Transformer().state_dict())
            self._llm = LLM(
                model=str(write_model(Path(folder, "model"), config, weights)), skip_tokenizer_init=True,
                load_format="dummy", dtype="float32", max_model_len=256, max_num_seqs=REQUESTS,
                kv_cache_memory_bytes=256 << 20, enforce_eager=True,
            )  # fmt: skip
        core: Any = self._llm.llm_engine.engine_core
        self._core = core.engine_core
        self._sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        self._prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4 + n % 8]} for n in range(REQUESTS)]
        self.content = b""

    def generate(self) -> float:
        """Generate once, and return the tokens per second."""
        began = time.perf_counter()
        self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
        return TOKENS * REQUESTS / (time.perf_counter() - began)

    def noted(self) -> float:
        from stepscope_vllm._engine_side import passes

        passes.begin(self._core, 100_000)
        try:
            return self.generate()
        finally:
            self.content = passes.end(self._core) or b""

    def cpu_of_hooks(self) -> tuple[float, float]:
        """Return (us of CPU of the hooks for a pass, ms of CPU of the whole thread for a pass)."""
        from stepscope_vllm._engine_side import passes

        passes.begin(self._core, 100_000)
        scheduler, notes = self._core.scheduler, self._core._stepscope_passes
        with_ns, without_ns = Counter[str](), Counter[str]()
        for name, inner in (("schedule", "_schedule"), ("update_from_output", "_update")):
            setattr(notes, inner, timed(getattr(notes, inner), without_ns))
            setattr(scheduler, name, timed(getattr(scheduler, name), with_ns))
        began_ns = time.thread_time_ns()
        self.generate()
        took_ns = time.thread_time_ns() - began_ns
        passes.end(self._core)
        number = with_ns["calls"] / 2
        return (with_ns["ns"] - without_ns["ns"]) / 1e3 / number, took_ns / 1e6 / number


def timed(call: Callable[..., Any], spent: Counter[str]) -> Callable[..., Any]:
    def made(*args: Any, **kw: Any) -> Any:
        began_ns = time.thread_time_ns()
        try:
            return call(*args, **kw)
        finally:
            spent["ns"] += time.thread_time_ns() - began_ns
            spent["calls"] += 1

    return made


def with_vllm(name: str, turns: int) -> None:
    from stepscope.engines.passes import encoded
    from stepscope_vllm._engine_side.passes import file_of

    engine = Engine(name)
    results = interleaved({OFF: engine.generate, ON: engine.noted}, turns)
    file = file_of(engine.content)
    passes, rows = len(file.passes.number), len(file.served.request)
    table(
        (f"vLLM, {name}", "tokens/s", "ms a pass", "/ off", "at least", "at most"),
        [
            (
                side,
                f"{statistics.median(values):.0f}",
                f"{1000 * TOKENS * REQUESTS / statistics.median(values) / passes:.2f}",
                *(f"{ratio:.3f}x" for ratio in ratio_interval(values, results[OFF])),
            )
            for side, values in results.items()
        ],
    )
    us, ms = map(statistics.median, zip(*(engine.cpu_of_hooks() for _ in range(5)), strict=True))
    verdict(f"{name}: CPU of the hooks, {us:.1f} us, of a pass of {ms:.2f} ms of CPU", us / ms / 10, 1, " %")
    ratio, _, _ = ratio_interval(results[ON], results[OFF])
    verdict(f"tokens per second with passes against without, {name}", ratio, 0.99, "x", at_least=True)
    verdict(f"file of {rows} requests in passes, bytes of each", len(encoded(file)) / rows, 40, "")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--vllm", action="store_true", help="also tokens per second of a real vLLM")
    options = made.parse_args()
    costs = {requests: us_of_a_pass(requests) for requests in (1, 32, 256)}
    notes = {requests: us_of_notes(requests, 20_000 if options.quick else 50_000) for requests in costs}
    header("passes", "stepscope-rollout-vllm")
    print("  requests in a pass  " + "".join(f"{requests:>8}" for requests in costs))
    print("  us of CPU           " + "".join(f"{us:>8.1f}" for us in costs.values()))
    print("  recorder, median    " + "".join(f"{statistics.median(own):>8.1f}" for own in notes.values()))
    print("  recorder, largest   " + "".join(f"{own[-1]:>8.1f}" for own in notes.values()) + "\n")
    verdict(f"notes of 256 requests, of a pass of {PASS_MS} ms", costs[256] / PASS_MS / 10, 1, " %")
    verdict("largest note of the flight recorder, ms", max(own[-1] for own in notes.values()) / 1e3, 1, "")
    copying, writing = ms_of_reading()
    verdict(f"reading a full ring on the engine's thread, ms (as a file: {writing:.0f})", copying, 100, "")
    if options.vllm:
        for name, turns in TURNS.items():
            with_vllm(name, turns // 5 if options.quick else turns)


if __name__ == "__main__":
    main()
