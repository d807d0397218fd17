"""CPU time and memory of merges, over sizes and numbers of files.

`_traces.py` makes the traces from a real torch trace, compressed with igzip as stepscope does. Each step is
merged in a separate process, which first merges a small step of two files twice. The table has CPU time,
wall-clock time, and the peak memory over a process that has imported stepscope. The steps take turns several
times, and the smallest time of each is printed, because a machine's speed varies. The first merge of a
process, which includes imports, and the second, smallest merge are printed separately. `--full` adds a step
of 10 GB, which needs 2 GB of disk.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from _measure import header, parser, table, verdict
from _traces import Template, build, quickly, record
from merge import peak_kb

from stepscope_report.timeline import merge_step

STEPS = [(2, 10), (8, 100), (8, 1000), (512, 1000)]
"""(number of files, MB of JSON in all files together)."""
FULL = [(512, 10_000)]
ROUNDS = 5
QUICK = [(2, 4), (8, 16), (64, 16)]


class Cost(NamedTuple):
    cpu_s: float
    took_s: float
    """Wall-clock time."""
    peak_mb: float
    first_s: float
    """CPU time of the process' first merge, of the small step."""
    small_s: float
    """CPU time of the process' second merge, of the small step again."""


def cpu_s(step: Path) -> float:
    """Merge a step and return the CPU time of the merge."""
    began = time.process_time()
    merged = merge_step(step)
    assert not merged.problems, merged.problems
    return time.process_time() - began


def once(step: Path, small: Path) -> None:
    """Merge the small step twice and `step` once, and print the costs for `measured` to read."""
    before = peak_kb()
    first_s, small_s = cpu_s(small), cpu_s(small)
    began = time.monotonic()
    used = cpu_s(step)
    took = time.monotonic() - began
    print(used, took, (peak_kb() - before) / 1000, first_s, small_s)


def measured(steps: dict[Path, int], small: Path) -> list[Cost]:
    """Merge the steps in turns, and return the smallest times and the largest memory of each step.

    Args:
        steps: {folder of a step: number of merges}.
    """
    runs: list[list[Cost]] = [[] for _ in steps]
    for turn in range(max(steps.values())):
        for (step, rounds), costs in zip(steps.items(), runs, strict=True):
            if turn >= rounds:
                continue
            done = subprocess.run(
                [sys.executable, __file__, "--once", str(step), str(small)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            costs.append(Cost(*map(float, done.stdout.split()[-5:])))
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
        rounds = [1 if chosen.quick or count in FULL else ROUNDS for count in wanted]
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
            ]
        )
    table(["", "MB/s of CPU", "ns/byte", "MB/s on the clock", "peak MB"], rows)
    first, small = (min(getattr(cost, name) for cost in all_of) * 1000 for name in ("first_s", "small_s"))
    print(
        f"two files of 20 KB: {small:.0f} ms of CPU; in a process that has not merged before {first:.0f} ms\n"
    )
    verdict("cost of a byte, largest over smallest", max(costs) / min(costs), 1.25, "x")
    verdict("peak memory", max(cost.peak_mb for cost in all_of), 64, " MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
