"""Cost of the flight recorder: a step with it on and off, its memory over many steps, and a dump.

A step holds 20,000 decorated calls among work of the interpreter and takes some 2 s; on and off take turns,
with the same calls below `least`: what no recorder in Python goes below.
The dump writes 20 steps of 20,000 spans in 8 processes: what the thread of the training pays, and how long
the background takes.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import _peers
from _measure import Measured, arguments, header, interleaved, ratio_interval, table, verdict

from stepscope import ProfileConfig, capture, profile_step
from stepscope._recording.recorder import standing
from stepscope.files.layout import RunLayout

SPANS = 20_000
RING = 160_000
"""Records that the least keeps, as the recorder does in 64 MB."""
DUMPED, PROCESSES = 20, 8
OFF, ON, FLOOR = "record: off", "record: spans", "the least in Python"


def work(value: int) -> int:
    for _ in range(WORK):
        value = (value * 31 + 7) & 0xFFFF
    return value


update = profile_step("actor", stage="update")(work)
WORK = 1
"""Rounds of work in a call; one writer: `calibrate`."""


def calibrate(seconds: float) -> None:
    """Choose the work of a call so that a step takes `seconds`."""
    global WORK
    WORK = 2_000
    began = time.perf_counter()
    for _ in range(200):
        update(7)
    WORK = max(1, int(WORK * seconds / SPANS * 200 / (time.perf_counter() - began)))


class Loop:
    """A loop of steps, of which each run does the next one."""

    def __init__(self, config: ProfileConfig, spans: int, call: Callable[[int], int] = update) -> None:
        self.config = config
        self.spans = spans
        self.call = call
        self.step = 0

    def run(self) -> float:
        """Return the ms of one step by the wall clock."""
        if self.config.record == "off":
            standing.stop()
        self.step += 1
        began = time.perf_counter()
        with capture(self.step, config=self.config):
            for _ in range(self.spans):
                self.call(7)
        return 1e3 * (time.perf_counter() - began)


def step_cost(folder: Path, quick: bool) -> float:
    calibrate(0.4 if quick else 2.0)
    common = {"control": {"requests": False}, "recorder": {"triggers": []}}
    off = Loop(ProfileConfig.from_mapping({"save_path": str(folder / "off"), **common}), SPANS)
    on = Loop(
        ProfileConfig.from_mapping({"save_path": str(folder / "on"), "record": "spans", **common}), SPANS
    )
    records: deque[_peers.Record] = deque(maxlen=RING)
    least = Loop(off.config, SPANS, _peers.least(records, work))
    results: Measured = interleaved({OFF: off.run, FLOOR: least.run, ON: on.run}, 4 if quick else 25)
    added = {}
    rows = [[OFF, f"{statistics.median(results[OFF]):.1f}", "", ""]]
    for name in (FLOOR, ON):
        added[name] = statistics.median(
            one / other for one, other in zip(results[name], results[OFF], strict=True)
        )
        _, low, high = ratio_interval(results[name], results[OFF])
        ms = f"{statistics.median(results[name]):.1f}"
        rows.append([name, ms, f"{added[name]:.4f}", f"{low:.4f} to {high:.4f}"])
    table([f"a step of {SPANS:,} calls", "ms", "median of the ratios of a round", "of medians, 95 %"], rows)
    return 100 * (added[ON] - 1)


def memory(folder: Path, steps: int) -> tuple[float, float]:
    """Return MB of the process after a fifth of the steps, and after all."""
    global WORK
    WORK = 1
    config = ProfileConfig.from_mapping(
        {"save_path": str(folder / "memory"), "record": "spans", "recorder": {"triggers": []},
         "control": {"requests": False}}
    )  # fmt: skip
    loop, seen = Loop(config, 2_000), []
    for number in range(steps):
        loop.run()
        if number in (steps // 5, steps - 1):
            recorder = standing.standing()
            assert recorder is not None
            recorder._work.drain(60)
            seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    standing.stop()
    return seen[0], seen[1]


WRITER = """
import sys, time
from stepscope import ProfileConfig, capture, span
from stepscope._recording.recorder import standing
recorder = {"triggers": [], "memory_mb": 256, "keep_steps": int(sys.argv[2]) + 1}
config = ProfileConfig.from_mapping(
    {"save_path": sys.argv[1], "record": "spans", "control": {"poll_seconds": 0.2}, "recorder": recorder}
)
for step in range(int(sys.argv[2])):
    with capture(step, config=config):
        for _ in range(int(sys.argv[3])):
            with span("update", role="actor"):
                pass
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[4] == "0":
    began = time.perf_counter()
    standing.standing().write_last(int(sys.argv[2]))
    print(1e3 * (time.perf_counter() - began), flush=True)
sys.stdin.readline()
"""


def dump(folder: Path, steps: int, spans: int, processes: int) -> tuple[float, float]:
    """Return ms in the thread that triggers, and seconds until all is written."""
    arguments_of = [str(folder), str(steps), str(spans)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments_of, str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"STEPSCOPE_RUN_ID": "feed0001", "RANK": str(rank), "WORLD_SIZE": str(processes), "PATH": ""},
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        for program in started:
            assert program.stdout is not None
            program.stdout.readline()
        began = time.perf_counter()
        for program in started:
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()
        first = started[0].stdout
        assert first is not None
        thread_ms = float(first.readline())
        layout = RunLayout(folder)
        wanted = steps * processes
        while sum(len(list(step.spans.glob("[!.]*.jsonl"))) for step in layout.steps().values()) < wanted:
            time.sleep(0.05)
        return thread_ms, time.perf_counter() - began
    finally:
        for program in started:
            program.kill()
            program.communicate()


def main() -> None:
    quick = arguments(__doc__).quick
    header("the flight recorder", "stepscope")
    folder = Path(tempfile.mkdtemp())
    try:
        percent = step_cost(folder, quick)
        early, late = memory(folder, 50 if quick else 500)
        steps, processes = (4, 2) if quick else (DUMPED, PROCESSES)
        thread_ms, seconds = dump(folder / "dump", steps, SPANS, processes)
    finally:
        shutil.rmtree(folder)
    print(
        f"  peak memory of the process: {early:.1f} MB after a fifth of the steps, {late:.1f} MB after all\n"
    )
    print(f"  a dump of {steps} steps x {processes} processes x {SPANS:,} spans:")
    print(f"  {thread_ms:.2f} ms in the thread that triggers it, {seconds:.1f} s until all is written\n")
    verdict("the recorder adds to a step", percent, 0.5, " %")
    verdict("memory grows from a fifth of the steps to all of them", late - early, 5, " MB")
    verdict("a dump takes of the training's thread", thread_ms, 50, " ms")
    verdict("a dump is written", seconds, 10, " s")


if __name__ == "__main__":
    main()
