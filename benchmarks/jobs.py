"""Time of merges and reports in one process and in two, over steps made from a real torch trace.

The two take turns. The children are started before the clock runs, as in a command that reads many steps. The
goal is for two idle cores, so the load of the machine is printed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from _measure import arguments, header, interleaved, ratio_interval, table, verdict
from _traces import Template, build, quickly, record

from stepscope.timeline import load_step, load_traces, merge_step
from stepscope.timeline.execution.child_processes import ChildProcesses

RANKS = 8
SIZE = 60_000_000
"""Bytes of JSON of each rank."""
ROUNDS = 7


def merged(step: Path, executor: Executor | None) -> bytes:
    merge_step(step, executor=executor)
    return (step / "timeline.json.gz").read_bytes()


def read(step: Path, executor: Executor | None) -> object:
    return load_traces(step, load_step(step), executor=executor)


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    quick = arguments(__doc__).quick
    header("traces in two processes", "stepscope", "torch", "isal", "msgspec", "stringzilla")
    rows = []
    with tempfile.TemporaryDirectory() as folder, ChildProcesses(2) as two:
        template = Template(record(20 if quick else 100))
        step, size = build(Path(folder), template, RANKS, SIZE // (10 if quick else 1), quickly)
        ratios = {}
        for name, work in (("merge", merged), ("traces of a report", read)):
            assert work(step, None) == work(step, two)
            sides: dict[str, Callable[[], float]] = {
                which: partial(seconds, partial(work, step, executor))
                for which, executor in (("one", None), ("two", two))
            }
            times = interleaved(sides, 3 if quick else ROUNDS)
            ratios[name], low, high = ratio_interval(times["one"], times["two"])
            one, both = (sorted(times[which])[len(times[which]) // 2] for which in sides)
            rows.append([name, f"{one:.2f}", f"{both:.2f}", f"{ratios[name]:.2f} ({low:.2f} to {high:.2f})"])
    print(f"{RANKS} ranks, {size / 1e6:.0f} MB of JSON\n")
    table(["", "one, s", "two, s", "times faster (95 %)"], rows)
    for name, ratio in ratios.items():
        verdict(f"{name} in two processes", ratio, 1.7, "x", at_least=True)


if __name__ == "__main__":
    main()
