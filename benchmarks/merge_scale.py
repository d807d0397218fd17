"""Whether merging costs the same for each byte, and the same memory, whatever the size and number of files.

The traces are made by `_traces.py` from a real torch trace, with igzip (as stepscope compresses its own).
Each step is merged in a process of its own, behind a step of two small files that is merged twice: CPU time
on one core, where nobody else's use of it counts; then time on the clock on all cores, and the peak memory of
both, above what a process has that has imported it, and with all that workers have. The steps take turns,
several times, and the least of each is printed: a machine's speed changes within seconds. What the first
merge of a process costs more is what it imports; it is printed apart, as is what a merge costs however small
it is. "Again" is a merge that finds nothing changed since the last one, and joins what that wrote. `--full`
adds 10 GB, once: 2 GB of disk while it runs.

Then one step is merged with a worker and without, in turn, whatever the load is: on a busy machine nothing is
to be seen of the time that it saves, and where two cores are one core's two threads, both of them are slower.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from _measure import header, interleaved, parser, table, verdict
from _traces import Template, build, quickly, record
from merge import peak_kb

from stepscope.timeline import merge_step
from stepscope.timeline.merge import earlier, merge, workers
from stepscope.timeline.merge.workers import idle_cores

STEPS = [(2, 10), (8, 100), (8, 1000), (512, 1000)]
"""Files, and MB of JSON in all of them."""
FULL = [(512, 10_000)]
SHARED = (8, 400)
"""Of those that are merged with workers and without."""
ROUNDS = 5
QUICK = [(2, 4), (8, 16), (64, 16)]


class Cost(NamedTuple):
    cpu_s: float
    took_s: float
    """On the clock, on all cores."""
    peak_mb: float
    first_s: float
    """CPU of a process' first merge, of a small step."""
    small_s: float
    """CPU of its second merge, of that step."""
    again_s: float
    """CPU of a merge of the step when nothing of it has changed since the last one."""


def used_s() -> float:
    """CPU of this process and of those it has waited for."""
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + done.ru_utime + done.ru_stime


def cpu_s(step: Path, *, again: bool = False) -> float:
    """With what an earlier merge wrote, or anew."""
    if not again:
        (step / "timeline.json.gz").unlink(missing_ok=True)
    began = used_s()
    merged = merge_step(step)
    assert not merged.problems, merged.problems
    assert (merged.joined > 0) == again
    return used_s() - began


def peak_of_workers_kb() -> int:
    """As if each had as much as the largest, and had it when the others do."""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return largest * min(workers.MOST, max(idle_cores(), 1))


def once(step: Path, small: Path) -> None:
    before, cores = peak_kb(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    first_s, small_s, used = cpu_s(small), cpu_s(small), cpu_s(step)
    again_s = cpu_s(step, again=True)
    os.sched_setaffinity(0, cores)
    (step / "timeline.json.gz").unlink()
    began = time.monotonic()
    merge_step(step)
    took = time.monotonic() - began
    print(used, took, (peak_kb() - before + peak_of_workers_kb()) / 1000, first_s, small_s, again_s)


def shared(template: Template, ranks: int, megabytes: int, rounds: int) -> None:
    """Merges a step as if no core was idle, and as if one was."""
    cpu: dict[int, list[float]] = {0: [], 1: []}

    def took_s(step: Path, cores: int) -> float:
        with patch.object(merge, "idle_cores", lambda: cores):
            began = time.monotonic()
            cpu[cores].append(cpu_s(step))
            return time.monotonic() - began

    with tempfile.TemporaryDirectory() as folder:
        step, size = build(Path(folder), template, ranks, megabytes * 1_000_000 // ranks, quickly)
        names = {"alone": 0, "with a worker": 1}
        runs = {name: partial(took_s, step, cores) for name, cores in names.items()}
        found = interleaved(runs, rounds)
    took = {name: statistics.median(times) for name, times in found.items()}
    used = {name: statistics.median(cpu[cores][1:]) for name, cores in names.items()}
    rows = [[name, f"{used[name]:.2f}", f"{took[name]:.2f}"] for name in names]
    table([f"{size / 1e6:.0f} MB in {ranks} files", "s of CPU", "s on the clock"], rows)
    verdict("CPU with a worker over alone", used["with a worker"] / used["alone"], 1.1, "x")
    verdict("time on the clock with a worker over alone", took["with a worker"] / took["alone"], 0.7, "x")


def measured(steps: dict[Path, int], small: Path) -> list[Cost]:
    """Of each step, run so many times, the least of its runs, which take turns; of the memory the most."""
    runs: list[list[Cost]] = [[] for _ in steps]
    time.sleep(earlier.SETTLED_NS / 1e9)  # of files that may still change nothing is kept
    for turn in range(max(steps.values())):
        for (step, rounds), costs in zip(steps.items(), runs, strict=True):
            if turn >= rounds:
                continue
            done = subprocess.run(
                [sys.executable, __file__, "--once", str(step), str(small)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            costs.append(Cost(*map(float, done.stdout.split()[-6:])))
    return [
        Cost(*map(min, zip(*costs, strict=True)))._replace(peak_mb=max(cost.peak_mb for cost in costs))
        for costs in runs
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="10 GB as well")
    chosen = options.parse_args()
    header("merging steps of all sizes", "stepscope", "torch", "isal", "msgspec", "stringzilla")
    template = Template(record(20 if chosen.quick else 100))
    wanted = QUICK if chosen.quick else STEPS + FULL * chosen.full
    with tempfile.TemporaryDirectory() as folder:
        small, _ = build(Path(folder, "small"), template, 2, 20_000, quickly)
        built = [
            build(Path(folder, str(number)), template, ranks, megabytes * 1_000_000 // ranks, quickly)
            for number, (ranks, megabytes) in enumerate(wanted)
        ]
        rounds = [1 if chosen.quick or each in FULL else ROUNDS for each in wanted]
        steps = dict(zip([step for step, _ in built], rounds, strict=True))
        all_of = measured(steps, small)
    rows, costs = [], []
    for (ranks, _), (_, size), cost in zip(wanted, built, all_of, strict=True):
        costs.append(cost.cpu_s / size * 1e9)
        rows.append(
            [
                f"{size / 1e6:.0f} MB in {ranks} files",
                f"{size / cost.cpu_s / 1e6:.0f}",
                f"{costs[-1]:.2f}",
                f"{size / cost.took_s / 1e6:.0f}",
                f"{cost.peak_mb:.0f}",
                f"{size / cost.again_s / 1e6:,.0f}",
            ]
        )
    table(["", "MB/s of CPU", "ns/byte", "MB/s on the clock", "peak MB", "again: MB/s of CPU"], rows)
    first, small = (min(getattr(cost, name) for cost in all_of) * 1000 for name in ("first_s", "small_s"))
    print(
        f"two files of 20 KB: {small:.0f} ms of CPU; in a process that has not merged before {first:.0f} ms\n"
    )
    if not chosen.quick:
        shared(template, *SHARED, ROUNDS)
    verdict("cost of a byte, largest over smallest", max(costs) / min(costs), 1.25, "x")
    verdict("peak memory", max(cost.peak_mb for cost in all_of), 64, " MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
