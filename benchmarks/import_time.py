"""Cost of `import stepscope` at the start of an interpreter: medians over fresh processes, interleaved.

The row `import stepscope` is the cost for workers, whose code decorates and opens spans and trajectories. The
row `every name` is the cost for a driver, which also configures and captures. Bytecode is cached, as after an
installation by pip: under PYTHONDONTWRITEBYTECODE, each start would compile the sources again.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial

from _measure import arguments, header, interleaved, table, verdict

STARTS = 41
GOAL_MS = 60
PROGRAMS = {
    "bare interpreter": "pass",
    "import stepscope": "import stepscope",
    "every name": "from stepscope import *",
    "every name, and instrument()": "from stepscope import *; instrument('json', 'dumps', role='env')",
    "import stepscope_report.cli": "import stepscope_report.cli",
    "import asyncio": "import asyncio",
}
"""{row: program}. The last row is a module of the standard library, for comparison."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def started(code: str, cpu: list[float]) -> float:
    """Return the wall ms of an interpreter that runs `code`, and append its CPU ms to `cpu`."""
    began = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], ENVIRONMENT)
    _, status, used = os.wait4(pid, 0)
    took = time.perf_counter() - began
    if status:
        sys.exit(f"{code!r} failed")
    cpu.append((used.ru_utime + used.ru_stime) * 1e3)
    return took * 1e3


def main() -> None:
    quick = arguments(__doc__).quick
    header("import stepscope", "stepscope", "msgspec", "wrapt")
    cpu: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    runs = {name: partial(started, code, cpu[name]) for name, code in PROGRAMS.items()}
    results = interleaved(runs, STARTS // 5 if quick else STARTS)
    wall = {name: statistics.median(values) for name, values in results.items()}
    used = {name: statistics.median(values) for name, values in cpu.items()}
    bare = "bare interpreter"
    rows = [
        [name, f"{wall[name]:.0f}", f"{wall[name] - wall[bare]:.0f}", f"{used[name] - used[bare]:.0f}"]
        for name in PROGRAMS
    ]
    table(["ms", "start to end", "over bare", "CPU over bare"], rows)
    for name in ("import stepscope", "every name"):
        verdict(f"{name}, over a bare interpreter", wall[name] - wall[bare], GOAL_MS, " ms")


if __name__ == "__main__":
    main()
