"""Cost of a report on a folder of torch traces: `stepscope report` compared with HolisticTraceAnalysis (HTA).

Each rank has a gzip trace of 100 MB of JSON, as a GPU makes them (`report_traces`). The command reads the
traces of all ranks. HTA reads a few traces, some before the command and some after it. Its CPU time for the
folder is computed from these, twice: for device times and kernels alone, and with the further analyses whose
results the report has too (causes of idle time, hidden communication, launches, queues).

CPU time is that of a process and its children. For the command it includes the start, for HTA it does not.
Memory is the peak of the process, minus the peak of a Python that imports nothing.
"""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from _measure import header, parser, table, verdict
from isal import igzip
from report_traces import RANKS, make_trace

LAYERS_OF_100_MB = 35_500
PEER = "HolisticTraceAnalysis"
REPORT = "import sys; from stepscope_report.cli import run; run(['report', *sys.argv[1:], '--json'])"
HTA_STARTS = "import sys, pathlib, report_traces as r, hta.trace_analysis; r.quiet()"
HTA = f"{HTA_STARTS}; [r.holistic(pathlib.Path(path)) for path in sys.argv[1:]]"
HTA_SAME = f"{HTA_STARTS}; [r.holistic_as_a_report(pathlib.Path(path)) for path in sys.argv[1:]]"
PRINT_PEAK = (
    "\nprint(); print(next(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))"
)


class Measured(NamedTuple):
    cpu_s: float
    """CPU time of the process and of its children."""
    took_s: float
    peak_mb: float


def write_traces(folder: Path, ranks: int, megabytes: int) -> float:
    """Write a trace for each rank. They differ only in the rank. Return the MB of a trace's JSON."""
    text = make_trace(0, LAYERS_OF_100_MB * megabytes // 100)
    for rank in range(ranks):
        own = text.replace(
            b'"rank": 0, "world_size": %d' % RANKS, b'"rank": %d, "world_size": %d' % (rank, ranks), 1
        )
        (folder / f"rank{rank}.pt.trace.json.gz").write_bytes(igzip.compress(own, 1))
    return len(text) / 1e6


def measured(code: str, *arguments: str) -> Measured:
    """Run code in a separate Python process, and return its costs."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-c", code + PRINT_PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(cpu, took, int(done.stdout.split()[-1]) / 1000)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=64)
    options.add_argument("--hta", type=int, default=2, metavar="N", help="traces that HTA reads")
    options.add_argument("--jobs", default="1", help="processes of the command")
    given = options.parse_args()
    header("a report on a folder of traces", "stepscope", PEER, "msgspec", "isal")
    ranks, size = (4, 10) if given.quick else (given.ranks, 100)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size_mb = write_traces(folder, ranks, size)
        bare = measured("")
        first, last = (
            [f"rank{rank}" for rank in numbers]
            for numbers in (range(given.hta), range(ranks - given.hta, ranks))
        )
        before = _peer(first, folder)
        ours = measured(REPORT, str(folder), "--jobs", given.jobs)
        after = _peer(last, folder)
        rows = [_row("stepscope", ranks, ranks * size_mb, ours, bare)]
        theirs = [
            _row(name, given.hta, given.hta * size_mb, taken, bare)
            for runs in (before, after)
            for name, taken in runs.items()
        ]
    table(
        ["of gzip traces", "MB of JSON", "CPU, s", "of a trace, s", "on the clock, s", "peak MB"],
        [*rows, *theirs],
    )
    verdict("peak memory above the interpreter", ours.peak_mb - bare.peak_mb, 64, " MB")
    for name in before:
        whole_s = (before[name].cpu_s + after[name].cpu_s) / (2 * given.hta) * ranks
        print(f"computed  {name} on all {ranks} traces: {whole_s:.0f} s of CPU")
        verdict(f"less CPU than {name}", whole_s / ours.cpu_s, 15, "x", at_least=True)


def _peer(names: list[str], folder: Path) -> dict[str, Measured]:
    """Measure HTA on these traces, without its imports. Return an empty dict if HTA is not installed."""
    try:
        importlib.import_module("hta.trace_analysis")
    except ImportError as error:
        print(f"not installed: {PEER} ({error})\n")
        return {}
    starts_s = measured(HTA_STARTS).cpu_s
    paths = [str(folder / f"{name}.pt.trace.json.gz") for name in names]
    taken = {PEER: measured(HTA, *paths), f"{PEER}, same results": measured(HTA_SAME, *paths)}
    return {name: one._replace(cpu_s=one.cpu_s - starts_s) for name, one in taken.items()}


def _row(name: str, traces: int, size_mb: float, taken: Measured, bare: Measured) -> list[str]:
    return [
        f"{name}, {traces} traces", f"{size_mb:.0f}", f"{taken.cpu_s:.1f}", f"{taken.cpu_s / traces:.2f}",
        f"{taken.took_s:.1f}", f"{taken.peak_mb - bare.peak_mb:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
