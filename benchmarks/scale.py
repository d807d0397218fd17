"""Reports of steps of 64, 256 and 1,024 ranks: from traces in one process, in two, on Ray, and from digests.

`_scale.py` makes the steps. Each report runs in a separate process, and all must give the same tables. CPU
time includes child processes, and for Ray the processes of its cluster of one node, which is started before
the clock. Peak memory is that of the reporting process. The time on 16 nodes is computed from these figures;
no cluster of several nodes ran.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import msgspec
from _measure import header, parser, table, verdict
from _scale import Ranks, ScaledStep, build, record
from merge import peak_kb

from stepscope.files.layout import StepLayout
from stepscope_report.cli.report import Pages
from stepscope_report.report import step_report
from stepscope_report.timeline import load_step, load_traces
from stepscope_report.timeline.processes import workers

RANKS = (64, 256, 1024)
SIZE = 8_000_000
"""Size of the JSON of each rank's trace, in bytes."""
ALONE = 256
"""The largest number of ranks for one process. More ranks take long, at the same cost per byte."""
QUICK = (16, 32, 64)
ROUNDS = 3
"""Number of reports from digests. The fastest counts."""
NODES, CORES = 16, 8
"""Nodes of the imagined cluster, and reading processes of each node."""


class Cost(msgspec.Struct):
    cpu_s: float
    took_s: float
    """Wall-clock time."""
    peak_mb: float
    tables: str
    """Hash of the report's JSON."""
    page_bytes: int
    page_s: float


@contextmanager
def readers(step: Path, how: str) -> Iterator[Executor | None]:
    """Yield the executor of reads: None for this process, two processes, or two Ray tasks at a time."""
    if how != "ray":
        with workers(2 if how == "two" else 1, 0) as executor:
            yield executor
        return
    from stepscope_report.cli.ray_nodes import connected  # imported late, because Ray adds 50 MB to the peak

    with connected("local", 2) as nodes:
        nodes.add_step(StepLayout(step))
        yield nodes


def cpu_of_children_s() -> float:
    """Return the CPU seconds of all child processes, running or ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = ended.ru_utime + ended.ru_stime
    for child in import_module("psutil").Process().children(recursive=True):
        times = child.cpu_times()
        cpu_s += times.user + times.system
    return cpu_s


def once(step: Path, how: str, digests: bool) -> Cost:
    """Report on a step, write its page, and return the costs."""
    with readers(step, how) as executor:
        began, before = time.monotonic(), cpu_of_children_s() if how == "ray" else 0.0
        timeline = load_step(step, digests=digests)
        traces = load_traces(step, timeline, executor=executor, digests=digests)
        report = step_report(timeline, traces)
        tables = msgspec.json.encode(report)
        took_s, peak_mb = time.monotonic() - began, peak_kb() / 1000
        of_ray = cpu_of_children_s() - before if how == "ray" else 0.0
    cpu_s = of_ray or cpu_of_children_s()
    own = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    Pages().add_step(StepLayout(step), timeline, report)
    page = StepLayout(step).report.stat().st_size
    page_s = time.monotonic() - began
    cpu_s += own.ru_utime + own.ru_stime
    return Cost(cpu_s, took_s, peak_mb, sha256(tables).hexdigest(), page, page_s)


def measured(step: Path, how: str, digests: bool) -> Cost:
    command = [sys.executable, __file__, "--once", str(step), how, str(int(digests))]
    done = subprocess.run(command, capture_output=True, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def compared(step: ScaledStep) -> dict[str, Cost]:
    """Return {way: cost}. The report in two processes writes the digests that the last way reads."""
    costs = {"one process": measured(step.path, "one", False)} if step.ranks <= ALONE else {}
    costs["Ray, two tasks"] = measured(step.path, "ray", False)
    costs["two processes"] = measured(step.path, "two", True)
    rounds = [measured(step.path, "one", True) for _ in range(ROUNDS)]
    costs["digests"] = min(rounds, key=lambda cost: cost.took_s)
    assert len({cost.tables for cost in costs.values()}) == 1, "the reports differ"
    return costs


def digest_bytes(step: ScaledStep) -> int:
    return sum(file.stat().st_size for file in StepLayout(step.path).digests.iterdir())


def computed(step: ScaledStep, costs: dict[str, Cost]) -> None:
    """Print the computed time on a cluster in which each node makes the digests of its ranks."""
    digests = costs["digests"]
    reading_s = costs["two processes"].cpu_s - digests.cpu_s
    total_s = reading_s / (NODES * CORES) + digests.took_s
    print(
        f"Computed, not run: {NODES} nodes, each with {CORES} processes for its {step.ranks // NODES} ranks."
    )
    print(f"reading: {reading_s:.0f} s of CPU; then the report from digests: {digests.took_s:.1f} s")
    print(f"{reading_s:.0f} / ({NODES} x {CORES}) + {digests.took_s:.1f} = {total_s:.1f} s\n")


def main() -> None:
    chosen = parser(__doc__).parse_args()
    header("reports of many ranks", "stepscope", "torch", "isal", "msgspec")
    ranks = Ranks(record(4 if chosen.quick else 10), SIZE)
    steps: list[tuple[ScaledStep, dict[str, Cost]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in QUICK if chosen.quick else RANKS:
            step = build(Path(folder, str(count)), ranks, count)
            steps.append((step, compared(step)))
            print(f"{count} ranks: the same tables in each way", flush=True)
        step, _ = steps[-1]
        size = digest_bytes(step) / step.disk_bytes
    sizes = f"{step.json_bytes / 1e9:.1f} GB of JSON, {step.disk_bytes / 1e6:.0f} MB on disk"
    print(f"{step.ranks} ranks: {sizes}; {step.missing} more are missing, {step.broken} files are cut off\n")
    head = ["", "CPU, s", "ns/byte", "on the clock, s", "peak MB", "page MB"]
    table(head, [_row(step, name, cost) for step, costs in steps for name, cost in costs.items()])
    computed(*steps[-1])
    last = steps[-1][1]["digests"]
    verdict("report of the most ranks from digests", last.took_s, 10, " s")
    verdict("its CPU", last.cpu_s, 10, " s")
    verdict("its peak memory", last.peak_mb, 500, " MB")
    verdict("digests, of the traces on disk", 100 * size, 1, " %")
    verdict("its page", last.page_bytes / 1e6, 5, " MB")


def _row(step: ScaledStep, name: str, cost: Cost) -> list[str]:
    return [
        f"{step.ranks + step.missing} ranks, {name}",
        f"{cost.cpu_s:.1f}",
        "" if name == "digests" else f"{cost.cpu_s / step.json_bytes * 1e9:.1f}",
        f"{cost.took_s:.1f}",
        f"{cost.peak_mb:.0f}",
        f"{cost.page_bytes / 1e6:.1f}",
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        cost = once(Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
        print(json.dumps(msgspec.to_builtins(cost)))
    else:
        main()
