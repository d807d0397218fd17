"""Cost of the spans of collectives: blocks of all_reduce with spans take turns with blocks without spans.

There is one rank, with gloo, so that no collective waits and the CPU time is the time of the calls. The
flight recorder is on in both kinds of blocks. One table row has collectives alone, the other has 0.1 ms of
work before each collective. The cost of 2,000 spans is compared with a step of 2 s.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import arguments, header, interleaved, ratio_interval, table, verdict
from torch import distributed
from torch._C._distributed_c10d import FileStore

from stepscope import ProfileConfig, capture
from stepscope._recording.spans import collective_calls

BLOCK = 20
COLLECTIVES, STEP_S = 2_000, 2.0
OFF, ON = "collectives: off", "collectives: on"
WORK_S = 0.0001


def block(is_on: bool, work: Callable[[], object]) -> Callable[[], float]:
    tensor = torch.ones(1000)

    def run() -> float:
        """Return the us of CPU of a collective and of the work before each collective."""
        collective_calls.watch(is_on)
        began = time.process_time_ns()
        for _ in range(BLOCK):
            work()
            distributed.all_reduce(tensor)
        return (time.process_time_ns() - began) / BLOCK / 1000

    return run


def nothing() -> None:
    pass


def computed() -> int:
    value = 7
    for _ in range(ROUNDS):
        value = (value * 31 + 7) & 0xFFFF
    return value


ROUNDS = 1
"""Rounds of work before a collective; one writer: `main`."""


def main() -> None:
    global ROUNDS
    quick = arguments(__doc__).quick
    header("spans of collectives", "stepscope", "torch")
    torch.set_num_threads(1)
    added = {}
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        config = ProfileConfig(
            save_path=f"{folder}/run", recorder={"triggers": ()}, control={"requests": False}
        )
        began = time.process_time()
        ROUNDS = 10_000
        computed()
        ROUNDS = int(ROUNDS * WORK_S / (time.process_time() - began))
        rows = []
        with capture(1, config=config):
            for what, work in (("alone", nothing), ("after 0.1 ms of work", computed)):
                runs = {OFF: block(False, work), ON: block(True, work)}
                results = interleaved(runs, 400 if quick else 4000)
                pairs = list(zip(results[ON], results[OFF], strict=True))
                added[what] = statistics.median(on - off for on, off in pairs)
                _, low, high = ratio_interval(results[ON], results[OFF])
                ratio = statistics.median(on / off for on, off in pairs)
                medians = [f"{statistics.median(results[side]):.2f}" for side in (OFF, ON)]
                rows.append(
                    [what, *medians, f"{added[what]:.2f}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}"]
                )
        distributed.destroy_process_group()
    head = ["us of CPU", OFF, ON, "added", "median of the ratios of a round", "of medians, 95 %"]
    table([f"a collective, {head[0]}", *head[1:]], rows)
    percent = 100 * COLLECTIVES * max(added.values()) / (STEP_S * 1e6)
    verdict(f"a step of {STEP_S:g} s with {COLLECTIVES:,} collectives takes longer by", percent, 0.5, " %")


if __name__ == "__main__":
    main()
