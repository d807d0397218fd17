"""Growth of the resident memory of a process that captures 200 steps, compared with torch.profiler alone.

Each side runs in a separate process. The slope is that of a straight line through all captures after the
first 50, in KB per capture. During the first 50, allocators still fill their arenas.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from _measure import header, parser, table, verdict

CAPTURES, WARM = 200, 50
OPERATORS = 2000
SIDES = ("torch", "stepscope")


def resident_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def train() -> None:
    import torch

    value = torch.ones(16)
    for _ in range(OPERATORS):
        value = value + 1


def by_torch(folder: Path) -> Callable[[int], None]:
    import torch

    def step(number: int) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train()
        profile.export_chrome_trace(str(folder / "torch.json"))

    return step


def by_stepscope(folder: Path) -> Callable[[int], None]:
    from stepscope import ProfileConfig, capture, flush, span

    config = ProfileConfig(
        save_path=str(folder),
        steps="every:1",
        roles={"*": {"ranks": "all"}},
        torch={"activities": ["cpu"]},
        budget={"keep_steps": 2, "free_mb": 0},
    )

    def step(number: int) -> None:
        with capture(number, config=config), span("update"):
            train()
        unwritten = flush(60)
        if unwritten:
            raise SystemExit(f"not written within a minute: {unwritten}")

    return step


def measure(side: str, captures: int) -> None:
    """Print as JSON the resident KB after each capture, and the threads and open files at the end."""
    folder = Path(tempfile.mkdtemp())
    try:
        step = (by_torch if side == "torch" else by_stepscope)(folder)
        held = []
        for number in range(captures):
            step(number)
            held.append(resident_kb())
        files = len(os.listdir("/proc/self/fd"))
        print(json.dumps({"held": held, "threads": threading.active_count(), "files": files}))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--side", choices=SIDES, help="measure this one here (what the benchmark starts)")
    chosen = options.parse_args()
    captures = CAPTURES // 5 if chosen.quick else CAPTURES
    warm = captures * WARM // CAPTURES
    if chosen.side:
        measure(chosen.side, captures)
        return
    header("memory of repeated captures", "stepscope", "torch")
    rows, slopes = [], {}
    quick = ["--quick"] if chosen.quick else []
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, *quick]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        remains = json.loads(out.splitlines()[-1])
        held = remains["held"]
        line = statistics.linear_regression(range(warm, captures), held[warm:])
        slopes[side] = line.slope
        marks = [held[at] / 1024 for at in (0, warm, captures // 2, captures - 1)]
        counts = [f"{line.slope:.1f}", str(remains["threads"]), str(remains["files"])]
        rows.append([side, *(f"{mark:.0f}" for mark in marks), *counts])
    at = [f"MB at {n}" for n in (1, warm + 1, captures // 2 + 1, captures)]
    table([f"{captures} captures", *at, "KB each", "threads", "open files"], rows)
    verdict("stepscope grows, for each capture", slopes["stepscope"], 10, " KB")


if __name__ == "__main__":
    main()
