"""The cost of noting forward passes in vLLM's engine core, without a profiler.

CPU of the engine core's thread for each pass, by the number of requests in it: calls of the real hooks around
a scheduler that does nothing, against calls of that scheduler alone, in turns. Needs no vLLM.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

from _measure import header, verdict

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


def main() -> None:
    costs = {requests: us_of_a_pass(requests) for requests in (1, 32, 256)}
    header("passes", "stepscope-rollout-vllm")
    print("  requests in a pass  " + "".join(f"{requests:>8}" for requests in costs))
    print("  us of CPU           " + "".join(f"{us:>8.1f}" for us in costs.values()) + "\n")
    verdict(f"notes of 256 requests, of a pass of {PASS_MS} ms", costs[256] / PASS_MS / 10, 1, " %")


if __name__ == "__main__":
    main()
