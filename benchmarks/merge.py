"""Cost of merging a step's traces: `merge_step` against reading the files, and against other mergers.

The input is a real torch trace (CPU), once for each rank under pids and times of its own (`_traces.py`), as
`.json.gz` of level 9, which is what torch writes: one of linear layers with what torch records by default,
and one of a transformer with the shapes of its operators. All times are CPU time of this process, on one
core, for the same files, in turning order; the peak memory is that of a process of its own. What a second
core is good for, `merge_scale.py` prints.
  gzip.open     reads the files, in blocks of 1 MiB, and does nothing with them: the floor for zlib
  igzip         reads them with igzip, and compresses what they hold with igzip: the floor for any merge
                that makes one compressed file of several, with the libraries that stepscope uses
  no lines      merges as stepscope, without seeking slices that cross others of their thread
  json          json.load of every file, ranks told apart in `pid`, json.dump through gzip level 1
  SGLang        its ProfileMerger, from its wheel, without what the wheel requires, as an engine runs it at
                the end of a profile: it merges, and reads the merged file again to say how many events there
                are. A merge of ours returns these numbers as well
  SGLang merges the first half of that alone

`--older FOLDER` merges the traces (`*.json.gz`) below a folder as well: for those of older Kineto layouts, on
GPUs, clone https://github.com/facebookresearch/HolisticTraceAnalysis and give its `tests/data`. Each is taken
whole.
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
"""Steps of the recorded training: some 100 MB of JSON, by all ranks. The last number is the goal of the
search for slices that cross, of the CPU of a merge without it."""
ROUNDS = 3
SHORT_ROUNDS = 15
"""Rounds of merges that take a second: this machine's speed changes within as little."""
_LARGE_ENOUGH = 300_000
"""Bytes of a file; smaller ones say more of the mergers' first steps than of merging."""
_MERGER = "sglang.srt.utils.profile_merger"


def files(step: Path) -> list[Path]:
    return sorted((step / "traces" / "actor").glob("*.json.gz"))


def read(step: Path) -> None:
    for path in files(step):
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass


def through(step: Path) -> None:
    """Compress the blocks of a merge, unchanged, at its level of compression."""
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
    """Takes every slice for one that nests."""

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
    (step / "timeline.json.gz").unlink(missing_ok=True)  # or what has not changed would be taken from it
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
    """Enter the packages without running their `__init__`, which imports the engine."""
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
    gc.enable()  # it is a part of what a merger costs who makes an object of each event
    began = time.process_time()
    merger(step)
    return time.process_time() - began


def peak_mb(name: str, step: Path) -> float:
    """Peak memory of one merger, in its own process, without the memory that importing it takes."""
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
    """Return the peak memory. ru_maxrss is no substitute: it begins with the parent's peak."""
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
    """Print a table."""
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
    """Return traces that every merger here can read: complete files of chrome events."""
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
        contenders.pop("json")  # it takes as long as SGLang's
        compared(step, contenders, rounds, f"JSON in {len(traces)} files, older Kineto layouts", 12, 1.15)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
