"""Whether merging costs the same for each byte, and the same memory, whatever the size and number of files.

The traces are made by `_traces.py` from a real torch trace, with igzip (as stepscope compresses its own).
Each step is merged in a process of its own, behind a step of two small files that is merged twice: CPU time
of all threads, time on the clock, and peak memory above what a process has that has imported it. What the
first merge of a process costs more is what it imports; it is printed apart, as is what a merge costs however
small it is. `--full` adds 10 GB, which takes 2 GB of disk while it runs.
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

from stepscope.timeline import merge_step

STEPS = [(2, 10), (8, 100), (8, 1000), (512, 1000)]
"""Files, and MB of JSON in all of them."""
FULL = [(512, 10_000)]
QUICK = [(2, 4), (8, 16), (64, 16)]


class Cost(NamedTuple):
    cpu_s: float
    took_s: float
    peak_mb: float
    first_s: float
    """CPU of a process' first merge, of a small step."""
    small_s: float
    """CPU of its second merge, of that step."""


def cpu_s(step: Path) -> float:
    began = time.process_time()
    merged = merge_step(step)
    assert not merged.problems, merged.problems
    return time.process_time() - began


def once(step: Path, small: Path) -> None:
    before = peak_kb()
    first_s, small_s = cpu_s(small), cpu_s(small)
    began = time.monotonic()
    print(cpu_s(step), time.monotonic() - began, (peak_kb() - before) / 1000, first_s, small_s)


def measured(template: Template, ranks: int, megabytes: int) -> tuple[Cost, int]:
    """And how many bytes that were."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        small, _ = build(Path(other), template, 2, 20_000, quickly)
        step, size = build(Path(folder), template, ranks, megabytes * 1_000_000 // ranks, quickly)
        runs = []
        for _ in range(3 if megabytes <= 100 else 1):
            done = subprocess.run(
                [sys.executable, __file__, "--once", str(step), str(small)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            runs.append(Cost(*map(float, done.stdout.split()[-5:])))
        return sorted(runs)[len(runs) // 2], size


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="10 GB as well")
    chosen = options.parse_args()
    header("merging steps of all sizes", "stepscope", "torch", "isal", "msgspec")
    template = Template(record(20 if chosen.quick else 100))
    rows, costs, all_of = [], [], list[Cost]()
    for ranks, megabytes in QUICK if chosen.quick else STEPS + FULL * chosen.full:
        cost, size = measured(template, ranks, megabytes)
        costs.append(cost.cpu_s / size * 1e9)
        all_of.append(cost)
        rows.append(
            [
                f"{size / 1e6:.0f} MB in {ranks} files",
                f"{size / cost.cpu_s / 1e6:.0f}",
                f"{costs[-1]:.2f}",
                f"{cost.cpu_s / cost.took_s:.2f}",
                f"{cost.peak_mb:.0f}",
            ]
        )
    table(["", "MB/s of CPU", "ns/byte", "CPUs used", "peak MB"], rows)
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
