"""The parts of the run, and the process of each part with its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.gpu.results import Result, read_result
from tools.repository import ROOT

TOTAL_S = 480.0
"""Limit of the whole command. A part may not take longer than the rest of this time."""
GRACE_S = 5.0
"""Time from the dump of a part's stacks to the end of the part."""


@dataclass(frozen=True)
class Part:
    """One part: a module of this package with a function `run(record, device, folder)`."""

    name: str
    module: str
    title: str
    limit_s: float


PARTS = (
    Part("machine", "machine", "the GPU, its driver and torch", 45),
    Part("traces", "traces", "torch traces with CUDA kernels, continuous and discrete", 70),
    Part("memory", "memory", "allocator snapshots, and running out of memory", 50),
    Part("overhead", "overhead", "captures beside bare torch.profiler", 80),
    Part("counters", "load_counters", "NVML counters during a load", 45),
    Part("training", "training", "the demo's trainer and in-process rollout on two processes", 130),
    Part("nsys", "nsys_ranges", "Nsight Systems", 60),
    Part("tests", "gpu_tests", "the tests that other machines skip", 110),
)


def run_part(part: Part, work: Path, log: Path, *, until: float, pretend: bool, paths: list[str]) -> Result:
    """Run a part in a separate process. At its limit, the process and its children are killed.

    Args:
        work: Empty folder of the part.
        log: File to which the part's output is appended.
        until: Monotonic time at which the whole command ends.
        paths: Folders for PYTHONPATH.
    """
    limit_s = max(0.0, min(part.limit_s, until - time.monotonic()))
    empty = Result(part.name, part.title, limit_s=limit_s, on_a_gpu=not pretend)
    if limit_s < 2 * GRACE_S:
        empty.state, empty.error = "late", f"no time was left of the {TOTAL_S:.0f} s of all parts"
        return empty
    work.mkdir(parents=True)
    file = work / "result.json"
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.gpu.part", part.name, str(work), str(limit_s)]
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            [*command, *(["--pretend"] if pretend else [])],
            cwd=ROOT,
            env=_environment(work, paths),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = _end_of(process, limit_s)
    try:
        result = read_result(file)
    except (OSError, ValueError):
        result = empty
    result.seconds = time.monotonic() - began
    result.limit_s = limit_s
    _conclude(result, code, log, start)
    return result


def _environment(work: Path, paths: list[str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE")}
    path = os.pathsep.join([str(ROOT), *paths, *filter(None, [kept.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "TMPDIR": str(work), "STEPSCOPE_RAISE": "1", "PYTHONUNBUFFERED": "1"}
    return {**kept, **own}


def _end_of(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a process, then kill its group. Return the exit code, or None if it reached its limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no child is left
        process.wait()


def _conclude(result: Result, code: int | None, log: Path, start: int) -> None:
    """Set the state of a part from its exit code and its checks."""
    if code is None:
        result.state = "late"
        result.error = f"it took longer than {result.limit_s:.0f} s\n{_tail(log, start)}"
    elif code:
        result.state = "failed"
        result.error = f"exit code {code}\n{_tail(log, start)}"
    elif result.state == "running":
        agreed = result.checks and all(check.agrees for check in result.checks)
        result.state = "passed" if agreed else "failed"


def _tail(log: Path, start: int, lines: int = 30) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
