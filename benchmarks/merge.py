"""What merging a step's traces costs: `merge_step` against reading the files, and against other mergers.

The input is a real torch trace (CPU, 43 MB of JSON), once for each rank, as `.json.gz`. All times are CPU
time of this process, for the same files, in turning order; the peak memory is that of a process of its own.
  gzip.open     reads the files, in blocks of 1 MiB, and does nothing with them: the floor for zlib
  json          json.load of every file, ranks told apart in `pid`, json.dump through gzip level 1
  SGLang        its ProfileMerger, as the wheel has it (put the wheel's folder into PYTHONPATH)
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from _measure import arguments, header, interleaved, table, verdict

from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope.timeline import merge_step

RANKS = 8
ROUNDS = 5
PROFILE_ID = "bench"
_MERGER = "sglang.srt.utils.profile_merger"


def record(steps: int) -> bytes:
    """A torch trace of so many small training steps, moved to when the step of the benchmark was."""
    import torch
    from torch.profiler import profile, record_function

    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)), torch.nn.Linear(32, 1))
    with profile() as profiler:
        for _ in range(steps):
            with record_function("update_policy"):
                model(torch.randn(4, 32)).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = path.read_bytes()
    first = re.search(rb'"ts": (\d+)', trace)
    assert first is not None
    base = b'"baseTimeNanoseconds": %d,' % (OPENED_NS - int(first[1]) * 1000)
    return re.sub(rb'"baseTimeNanoseconds": \d+,', base, trace, count=1)


def build(root: Path, trace: bytes, ranks: int) -> Path:
    """The folder of a step in which every rank has left this trace."""
    folder = StepFolder(root)
    folder.process("trainer", owner=True).close(10**10)
    packed = gzip.compress(trace, 1)
    for rank in range(ranks):
        actor = folder.process("actor", rank)
        actor.span("update_policy", 0, 10**9)
        actor.close(10**10)
        path = folder.layout.traces / "actor" / f"{PROFILE_ID}-TP-{rank}.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        artifact = Artifact(
            path=str(path.relative_to(folder.layout.root)), kind="torch_trace", tool="torch", role="actor",
            rank=rank, host=actor.info.host, pid=actor.info.pid, size_bytes=len(packed),
        )  # fmt: skip
        made = Sidecar(
            step=folder.step,
            run_id=folder.run_id,
            artifact=artifact,
            process=actor.info.key,
            opened=None,
            closed=None,
        )
        sidecar_of(path).write_bytes(msgspec.json.encode(made))
    return folder.write()


def files(step: Path) -> list[Path]:
    return sorted((step / "traces" / "actor").glob("*.json.gz"))


def read(step: Path) -> None:
    for path in files(step):
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass


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


def with_sglang(step: Path) -> None:
    merger = importlib.import_module(_MERGER)
    folder = step / "traces" / "actor"
    merger.ProfileMerger(str(folder), PROFILE_ID).merge_chrome_traces()
    for path in folder.glob("merged-*"):
        path.unlink()


def ours(step: Path) -> None:
    merged = merge_step(step)
    assert not merged.problems, merged.problems


MERGERS: dict[str, Callable[[Path], None]] = {
    "stepscope": ours,
    "gzip.open": read,
    "json": with_json,
    "SGLang": with_sglang,
}


def sglang_found() -> bool:
    """Enters the packages without running their `__init__`, which imports the engine."""
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
    began = time.process_time()
    merger(step)
    return time.process_time() - began


def peak_mb(name: str, step: Path) -> float:
    """Peak memory of one merger above what a process has that has imported it, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--once", name, str(step)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def once(name: str, step: Path) -> None:
    if name == "SGLang":
        sglang_found()
    before = peak_kb()
    MERGERS[name](step)
    print((peak_kb() - before) / 1000)


def peak_kb() -> int:
    """Not ru_maxrss: that of a new process begins with what its parent had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    quick = arguments(__doc__).quick
    header("merging the traces of a step", "stepscope", "torch", "isal", "msgspec")
    contenders = dict(MERGERS)
    if not sglang_found():
        print("not installed: SGLang's ProfileMerger\n")
        del contenders["SGLang"]
    with tempfile.TemporaryDirectory() as folder:
        trace = record(60 if quick else 400)
        step = build(Path(folder), trace, RANKS)
        size = len(trace) * RANKS / 1e6
        runs = {name: (lambda merger=merger: timed(merger, step)) for name, merger in contenders.items()}
        found = interleaved(runs, 2 if quick else ROUNDS)
        medians = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
        rows = [
            [
                name,
                f"{size / seconds:.0f}",
                f"{seconds / medians['stepscope']:.2f}x",
                f"{peak_mb(name, step):.0f}",
            ]
            for name, seconds in medians.items()
        ]
    table([f"{size:.0f} MB of JSON in {RANKS} files", "MB/s of CPU", "CPU/ours", "peak MB"], rows)
    verdict("CPU over reading with gzip.open", medians["stepscope"] / medians["gzip.open"], 5.5, "x")
    if "SGLang" in medians:
        verdict("less CPU than SGLang", medians["SGLang"] / medians["stepscope"], 20, "x", at_least=True)
    verdict("peak memory", float(rows[0][-1]), 64, " MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
