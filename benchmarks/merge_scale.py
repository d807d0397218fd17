"""Whether merging costs the same for each byte, and the same memory, whatever the size and number of files.

The traces are made by `_traces.py` from a real torch trace, with igzip (as stepscope compresses its own).
Each step is merged in a process of its own: CPU time of all its threads, time on the clock, and peak memory
above what a process has that has imported it. `--full` adds 10 GB, which takes 2 GB of disk while it runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import header, parser, table, verdict
from _traces import Template, build, quickly, record
from merge import peak_kb

from stepscope.timeline import merge_step

STEPS = [(2, 10), (8, 100), (8, 1000), (512, 1000)]
"""Files, and MB of JSON in all of them."""
FULL = [(512, 10_000)]
QUICK = [(2, 4), (8, 16), (64, 16)]


def once(step: Path) -> None:
    before, began, cpu = peak_kb(), time.monotonic(), time.process_time()
    merged = merge_step(step)
    took = time.process_time() - cpu, time.monotonic() - began, (peak_kb() - before) / 1000
    assert not merged.problems, merged.problems
    print(*took, merged.events)


def measured(template: Template, ranks: int, megabytes: int) -> tuple[float, float, float, int]:
    """CPU seconds, seconds, MB of memory, bytes."""
    with tempfile.TemporaryDirectory() as folder:
        step, size = build(Path(folder), template, ranks, megabytes * 1_000_000 // ranks, quickly)
        runs = []
        for _ in range(3 if megabytes <= 100 else 1):
            done = subprocess.run(
                [sys.executable, __file__, "--once", str(step)], capture_output=True, text=True, check=True
            )
            cpu_s, took_s, peak, _ = map(float, done.stdout.split()[-4:])
            runs.append((cpu_s, took_s, peak))
        return (*sorted(runs)[len(runs) // 2], size)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="10 GB as well")
    chosen = options.parse_args()
    header("merging steps of all sizes", "stepscope", "torch", "isal", "msgspec")
    template = Template(record(20 if chosen.quick else 100))
    rows, costs, peaks = [], [], []
    for ranks, megabytes in QUICK if chosen.quick else STEPS + FULL * chosen.full:
        cpu_s, took_s, peak, size = measured(template, ranks, megabytes)
        costs.append(cpu_s / size * 1e9)
        peaks.append(peak)
        rows.append(
            [
                f"{size / 1e6:.0f} MB in {ranks} files",
                f"{size / cpu_s / 1e6:.0f}",
                f"{costs[-1]:.2f}",
                f"{cpu_s / took_s:.2f}",
                f"{peak:.0f}",
            ]
        )
    table(["", "MB/s of CPU", "ns/byte", "CPUs used", "peak MB"], rows)
    verdict("cost of a byte, largest over smallest", max(costs) / min(costs), 1.25, "x")
    verdict("peak memory", max(peaks), 64, " MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(Path(sys.argv[2]))
    else:
        main()
