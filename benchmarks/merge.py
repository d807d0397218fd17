"""Cost of merging a step's traces with `merge_step`, compared with reading the files and with other mergers.

The input is a real torch trace (CPU), copied for each rank with its own pids and times (`_traces.py`), as
`.json.gz` of level 9, as torch writes it. There are three such steps: of linear layers, and of a transformer
with shapes of operators or with stacks. All times are CPU time of this process for the same files, in
rotating order. The peak memory is of a separate process.
  gzip.open     reads the files in blocks of 1 MiB: the minimum for any merger with zlib
  igzip         reads the files and compresses their content with igzip: the minimum for any merge into one
                compressed file with the libraries that stepscope uses
  no lines      merges as stepscope does, without the search for slices that cross others of their thread
  json          json.load of every file, a prefix in `pid` for each rank, json.dump through gzip level 1
  SGLang        SGLang's ProfileMerger, from its wheel, as an engine runs it at the end of a profile: it
                merges, and reads the merged file again to count the events. `merge_step` counts them, too
  SGLang merges SGLang's ProfileMerger without the second reading

`--older FOLDER` also merges the traces (`*.json.gz`) below a folder, for example traces of GPUs with older
Kineto layouts: `tests/data` in a clone of https://github.com/facebookresearch/HolisticTraceAnalysis.
"""

from __future__ import annotations

import gc
import gzip
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from _measure import header, interleaved, parser, table, verdict
from _traces import (
    PROFILE_ID,
    Template,
    as_torch,
    build,
    build_of_files,
    record,
    record_stacks,
    record_transformer,
)

from stepscope_report.timeline import merge_step
from stepscope_report.timeline.merge import rewrite
from stepscope_report.timeline.merge.crossing import Lines, Moved
from stepscope_report.timeline.readers.blocks import read_blocks
from stepscope_report.timeline.readers.contract import Notes

RANKS = 3
STEPS = {
    "linear layers": (record, 300, 1.15),
    "a transformer, with shapes": (record_transformer, 20, 1.15),
    "a transformer, with stacks": (record_stacks, 40, 2),
}
"""{name: (function that records a trace, training steps to record, goal)}. The goal is the largest ratio of
the CPU of a merge to the CPU of a merge without the search for slices that cross."""
ROUNDS = 3
SHORT_ROUNDS = 15
"""Rounds of the merges that take about a second. There are many, because a machine's speed varies."""
_LARGE_ENOUGH = 300_000
"""Smallest size of a file in bytes. For smaller files, the start of a merger takes most of the time."""
_MERGER = "sglang.srt.utils.profile_merger"


def files(step: Path) -> list[Path]:
    return sorted((step / "traces" / "actor").glob("*.json.gz"))


def read(step: Path) -> None:
    for path in files(step):
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass


def through(step: Path) -> None:
    """Read the files in the blocks of a merge, and compress the blocks unchanged at the level of a merge."""
    from isal import isal_zlib

    packed = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31, 9)
    with (step / "igzip.out.gz").open("wb") as out:
        for path in files(step):
            for block in read_blocks(path, Notes()):
                out.write(packed.compress(block))
        out.write(packed.flush())


def without_lines(step: Path) -> None:
    with mock.patch.object(rewrite, "Lines", OneLine):
        ours(step)


class OneLine(Lines):
    """Stand-in for `Lines` that assumes that all slices nest."""

    def place(self, events: Iterable[Any], tracks: Mapping[int, int]) -> list[Moved]:
        return []

    def line_of(self, track: int, start_us: float, dur_us: float) -> int:
        return 0


def with_json(step: Path) -> None:
    merged: list[dict[str, Any]] = []
    for rank, path in enumerate(files(step)):
        with gzip.open(path, "rt") as file:
            for event in json.load(file)["traceEvents"]:
                if "pid" in event:
                    event["pid"] = f"[{rank}] {event['pid']}"
                merged.append(event)
    with gzip.open(step / "json.out.gz", "wt", 1) as out:
        json.dump({"traceEvents": merged}, out)


def with_sglang(step: Path, *, summary: bool = True) -> None:
    folder = step / "traces" / "actor"
    merger = importlib.import_module(_MERGER).ProfileMerger(str(folder), PROFILE_ID)
    merged = Path(merger.merge_chrome_traces())
    if summary:
        assert merger.get_merge_summary()["total_events"] > 0
    merged.unlink()


def merging_with_sglang(step: Path) -> None:
    with_sglang(step, summary=False)


def ours(step: Path) -> None:
    (step / "timeline.json.gz").unlink(missing_ok=True)  # or unchanged parts would be copied from it
    merged = merge_step(step)
    lost = [problem for problem in merged.problems if not problem.what.startswith("unaligned")]
    assert not lost, lost


MERGERS: dict[str, Callable[[Path], None]] = {
    "stepscope": ours,
    "no lines": without_lines,
    "gzip.open": read,
    "igzip": through,
    "json": with_json,
    "SGLang": with_sglang,
    "SGLang merges": merging_with_sglang,
}


def sglang_found() -> bool:
    """Make SGLang's merger importable without running `__init__` modules. Return whether it was found."""
    *packages, _ = _MERGER.split(".")
    for depth in range(1, len(packages) + 1):
        name = ".".join(packages[:depth])
        parent = sys.modules.get(name.rpartition(".")[0])
        spec = PathFinder.find_spec(name, parent.__path__ if parent else None)
        if spec is None or spec.submodule_search_locations is None:
            return False
        package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
    return importlib.util.find_spec(_MERGER) is not None


def timed(merger: Callable[[Path], None], step: Path) -> float:
    gc.collect()
    gc.enable()  # collections are a part of the cost of a merger that makes an object for each event
    began = time.process_time()
    merger(step)
    return time.process_time() - began


def peak_mb(name: str, step: Path) -> float:
    """Return the peak memory of a merger in a separate process, without the memory of its imports."""
    done = subprocess.run(
        [sys.executable, __file__, "--once", name, str(step)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def once(name: str, step: Path) -> None:
    if name.startswith("SGLang"):
        sglang_found()
    before = peak_kb()
    MERGERS[name](step)
    print((peak_kb() - before) / 1000)


def peak_kb() -> int:
    """Return the peak memory of this process. `ru_maxrss` would include the parent's peak."""
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1])


def compared(
    step: Path,
    contenders: dict[str, Callable[[Path], None]],
    rounds: int,
    what: str,
    less_than_sglang: float,
    lines_limit: float,
) -> None:
    """Run the contenders on a step, and print the table and the verdicts."""
    size = sum(len(gzip.decompress(path.read_bytes())) for path in files(step)) / 1e6
    runs = {name: (lambda merger=merger: timed(merger, step)) for name, merger in contenders.items()}
    results = interleaved(runs, rounds)
    medians = {name: sorted(times)[len(times) // 2] for name, times in results.items()}
    peaks = {name: peak_mb(name, step) for name in medians}
    rows = [
        [name, f"{size / seconds:.0f}", f"{seconds / medians['stepscope']:.2f}x", f"{peaks[name]:.0f}"]
        for name, seconds in medians.items()
    ]
    table([f"{size:.0f} MB of {what}", "MB/s of CPU", "CPU/ours", "peak MB"], rows)
    print(f"the floor, igzip both ways, is {medians['igzip'] / medians['stepscope']:.0%} of our CPU", end="")
    if "SGLang" in medians:
        print(f": {medians['SGLang'] / medians['igzip']:.1f}x less than SGLang's", end="")
    print("\n")
    short = interleaved(
        {name: runs[name] for name in ("stepscope", "gzip.open", "no lines")}, rounds * SHORT_ROUNDS // ROUNDS
    )
    over = statistics.median(a / b for a, b in zip(short["stepscope"], short["gzip.open"], strict=True))
    verdict(f"CPU over reading with gzip.open, median of {len(short['stepscope'])} turns", over, 5.5, "x")
    ratio = statistics.median(a / b for a, b in zip(short["stepscope"], short["no lines"], strict=True))
    verdict("CPU over a merge that seeks no slices that cross", ratio, lines_limit, "x")
    if "SGLang" in medians:
        less = medians["SGLang"] / medians["stepscope"]
        verdict("less CPU than SGLang", less, less_than_sglang, "x", at_least=True)
    verdict("peak memory", peaks["stepscope"], 64, " MB")
    print()


def older(folder: Path) -> list[Path]:
    """Return the traces below `folder` that all mergers can read: complete files whose events have a pid."""
    paths = []
    for path in sorted(folder.rglob("*.json.gz")):
        try:
            large = path.stat().st_size >= _LARGE_ENOUGH
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if large else []
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            continue
        if events and all("pid" in event for event in events):
            paths.append(path)
    return paths


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--older", type=Path, metavar="FOLDER", help="real traces to merge as well")
    chosen = options.parse_args()
    rounds = 1 if chosen.quick else ROUNDS
    header("merging the traces of a step", "stepscope", "torch", "isal", "msgspec", "stringzilla")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    contenders = dict(MERGERS)
    if not sglang_found():
        print("not installed: SGLang's ProfileMerger\n")
        del contenders["SGLang"], contenders["SGLang merges"]
    with tempfile.TemporaryDirectory() as folder:
        for name, (recorded, steps, limit) in STEPS.items():
            trace = recorded(steps // 4 if chosen.quick else steps)
            step, _ = build(Path(folder, name), Template(trace), RANKS, len(trace), as_torch)
            compared(step, contenders, rounds, f"JSON in {RANKS} files, {name}", 20, limit)
    traces = [] if chosen.older is None else older(chosen.older)
    if not traces:
        print("skipped: older Kineto layouts; give real traces with --older FOLDER (see --help)")
        return
    with tempfile.TemporaryDirectory() as folder:
        step = build_of_files(Path(folder), traces)
        contenders.pop("json")  # takes as long as SGLang
        compared(step, contenders, rounds, f"JSON in {len(traces)} files, older Kineto layouts", 12, 1.15)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
