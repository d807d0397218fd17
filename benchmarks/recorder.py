"""Cost of the flight recorder: of a span, of the end of a step, of a dump, and its memory over many steps.

Short blocks of decorated calls take turns: with the recorder, without it, and with the cheapest record of a
call that Python allows. Each call does 0.1 ms of Python work. CPU times are compared, because wall times on
shared cores include other programs. The dump writes 20 steps of 20,000 spans in 8 processes. Its costs are
the time in the training's thread, and the time until the files are complete.
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
from stepscope._recording.spans import slot
from stepscope._recording.spans.slot import ActiveSession
from stepscope.files.layout import RunLayout

SPANS, STEP_S = 4_000, 2.0
"""Spans and seconds of a step. 2,000 spans a second are more than steps of RL post-training have."""
BLOCK, CALL_S = 20, 0.0001
"""Calls of a block, and seconds of work in a call. Blocks are short, so that the load stays the same."""
DUMPED_SPANS = 20_000
RING = 160_000
"""Number of records that the cheapest recorder keeps: about as many as the flight recorder in 64 MB."""
DUMPED, PROCESSES = 20, 8
OFF, ON, FLOOR = "record: off", "record: spans", "the least in Python"


def work(value: int) -> int:
    for _ in range(WORK):
        value = (value * 31 + 7) & 0xFFFF
    return value


update = profile_step("actor", stage="update")(work)
WORK = 1
"""Rounds of work in a call; one writer: `calibrate`."""


def calibrate() -> None:
    """Set `WORK` so that a call takes `CALL_S`."""
    global WORK
    WORK = 2_000
    began = time.process_time()
    for _ in range(200):
        update(7)
    WORK = max(1, int(WORK * CALL_S * 200 / (time.process_time() - began)))


class Loop:
    """A loop of steps. Each `run` does the next step."""

    def __init__(self, config: ProfileConfig, spans: int) -> None:
        self.config = config
        self.spans = spans
        self.step = 0

    def run(self) -> float:
        """Run a step. Return the ms of CPU from its last span until the recorder's thread is done."""
        self.step += 1
        with capture(self.step, config=self.config):
            for _ in range(self.spans):
                update(7)
            began = time.process_time_ns()
        recorder = standing.standing()
        if recorder is not None:
            recorder._work.drain(60)
        return 1e-6 * (time.process_time_ns() - began)


class Block:
    """Calls within one long step, recorded by `active` or not recorded."""

    def __init__(self, call: Callable[[int], int], active: ActiveSession | None) -> None:
        self.call = call
        self.active = active

    def run(self) -> float:
        """Return the ms of CPU of the block."""
        slot.active, before = self.active, slot.active
        began = time.process_time_ns()
        for _ in range(BLOCK):
            self.call(7)
        took_ns = time.process_time_ns() - began
        slot.active = before
        return 1e-6 * took_ns


def step_cost(folder: Path, quick: bool) -> tuple[float, float]:
    """Return (us of CPU that a recorded span adds, percent that the recorder adds to a step)."""
    calibrate()
    settings = {"control": {"requests": False}, "recorder": {"triggers": []}}
    config = ProfileConfig.from_mapping({"save_path": str(folder / "on"), **settings})
    records: deque[_peers.Record] = deque(maxlen=RING)
    with capture(1, config=config):
        blocks = {
            OFF: Block(update, None),
            FLOOR: Block(_peers.least(records, work), None),
            ON: Block(update, slot.active),
        }
        runs = {name: block.run for name, block in blocks.items()}
        results: Measured = interleaved(runs, 400 if quick else 4000)
    added, rows = {}, [[OFF, f"{statistics.median(results[OFF]):.2f}", "", "", ""]]
    for name in (FLOOR, ON):
        pairs = list(zip(results[name], results[OFF], strict=True))
        added[name] = statistics.median(1e3 * (one - other) / BLOCK for one, other in pairs)
        ratio = statistics.median(one / other for one, other in pairs)
        _, low, high = ratio_interval(results[name], results[OFF])
        ms = f"{statistics.median(results[name]):.2f}"
        rows.append([name, ms, f"{added[name]:.2f}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}"])
    head = [f"{BLOCK} calls", "ms of CPU", "us a span", "median of the ratios of a round", "of medians, 95 %"]
    table(head, rows)
    ends_us = end_cost(folder, settings, quick)
    print(f"  the end of a step of {SPANS:,} spans, its line included: {ends_us / 1000:.2f} ms of CPU\n")
    return added[ON], 100 * (SPANS * added[ON] + ends_us) / (STEP_S * 1e6)


def end_cost(folder: Path, settings: dict[str, object], quick: bool) -> float:
    """Return the us of CPU of the recorder at the end of a step, in the loop and the recorder's thread."""
    global WORK
    before, WORK = WORK, 1
    loop = Loop(ProfileConfig.from_mapping({"save_path": str(folder / "on"), **settings}), SPANS)
    results = interleaved({ON: loop.run}, 10 if quick else 50)
    WORK = before
    return 1e3 * statistics.median(results[ON])


def memory(folder: Path, steps: int) -> tuple[float, float]:
    """Return the peak MB of the process (after a fifth of the steps, after all steps)."""
    global WORK
    WORK = 1
    config = ProfileConfig.from_mapping(
        {"save_path": str(folder / "memory"), "recorder": {"triggers": []},
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
from stepscope._recording.spans import slot
from stepscope._recording.spans.slot import ActiveSession
recorder = {"triggers": [], "memory_mb": 256, "keep_steps": int(sys.argv[2]) + 1}
config = ProfileConfig.from_mapping(
    {"save_path": sys.argv[1], "control": {"poll_seconds": 0.2}, "recorder": recorder}
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
    """Return (ms in the thread that triggers the dump, seconds until all files are written)."""
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
        span_us, percent = step_cost(folder, quick)
        early, late = memory(folder, 50 if quick else 500)
        steps, processes = (4, 2) if quick else (DUMPED, PROCESSES)
        thread_ms, seconds = dump(folder / "dump", steps, DUMPED_SPANS, processes)
    finally:
        shutil.rmtree(folder)
    print(
        f"  peak memory of the process: {early:.1f} MB after a fifth of the steps, {late:.1f} MB after all\n"
    )
    print(f"  a dump of {steps} steps x {processes} processes x {DUMPED_SPANS:,} spans:")
    print(f"  {thread_ms:.2f} ms in the thread that triggers it, {seconds:.1f} s until all is written\n")
    verdict("a span in the recorder", span_us, 1.6, " us of CPU")
    verdict("the recorder adds to a step of 2,000 spans a second", percent, 0.4, " %")
    verdict("memory grows from a fifth of the steps to all of them", late - early, 5, " MB")
    verdict("a dump takes of the training's thread", thread_ms, 50, " ms")
    verdict("a dump is written", seconds, 10, " s")


if __name__ == "__main__":
    main()
