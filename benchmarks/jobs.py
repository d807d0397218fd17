"""Time to read the traces of a step in one process, in two processes, and by two actors of Ray.

The three take turns. Children and Ray's workers are started before the clock runs, as in a command that reads
many steps. A setting keeps Ray from ending idle workers, as it does after a second. The goal is for two idle
cores, so the load of the machine is printed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from _measure import arguments, header, interleaved, ratio_interval, table, verdict
from _traces import Template, build, quickly, record

from stepscope.files.layout import StepLayout
from stepscope_report.cli.ray_nodes import connected
from stepscope_report.timeline import load_step, load_traces
from stepscope_report.timeline.processes import workers

RANKS = 8
SIZE = 60_000_000
"""Size of the JSON of each rank's trace, in bytes."""
ROUNDS = 7


def read(step: Path, executor: Executor | None) -> object:
    return load_traces(step, load_step(step, digests=False), executor=executor, digests=False)


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    quick = arguments(__doc__).quick
    header("traces in two processes", "stepscope", "torch", "isal", "msgspec", "stringzilla")
    rows = []
    os.environ["RAY_idle_worker_killing_time_threshold_ms"] = "600000"  # noqa: SIM112  # Ray's spelling
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        two = stack.enter_context(workers(2, 0))
        nodes = stack.enter_context(connected("local", 2))
        template = Template(record(20 if quick else 100))
        step, size = build(Path(folder), template, RANKS, SIZE // (10 if quick else 1), quickly)
        nodes.add_step(StepLayout(step))
        ratios = {}
        for name, work in (("traces of a report", read),):
            assert work(step, None) == work(step, two) == work(step, nodes)
            sides: dict[str, Callable[[], float]] = {
                which: partial(seconds, partial(work, step, executor))
                for which, executor in (("one", None), ("two", two), ("Ray", nodes))
            }
            times = interleaved(sides, 3 if quick else ROUNDS)
            ratios[name] = [ratio_interval(times["one"], times[which]) for which in ("two", "Ray")]
            middle = [f"{sorted(times[which])[len(times[which]) // 2]:.2f}" for which in sides]
            faster = [f"{ratio:.2f} ({low:.2f} to {high:.2f})" for ratio, low, high in ratios[name]]
            rows.append([name, *middle, *faster])
    print(f"{RANKS} ranks, {size / 1e6:.0f} MB of JSON\n")
    table(["", "one, s", "two, s", "Ray, s", "two, times faster (95 %)", "Ray"], rows)
    for name, (processes, tasks) in ratios.items():
        verdict(f"{name} in two processes", processes[0], 1.7, "x", at_least=True)
        verdict(f"{name} by two tasks of Ray", tasks[0], 1.5, "x", at_least=True)


if __name__ == "__main__":
    main()
