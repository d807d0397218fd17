"""CPU seconds of `stepscope what-if` on a step of 8,000 generations, simulated with a known curve."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _measure import arguments, header, table, verdict

from stepscope.testing.steps import StepFolder
from stepscope_report.timeline import load_step
from stepscope_report.whatif import Call, Phase, Trajectory
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.curve import Curve
from stepscope_report.whatif.prediction import Predicting
from stepscope_report.whatif.replay import Rules, replay

REPLICAS, ROUNDS = 8, 5
MS = 1_000_000
FULL = Curve(((1.0, 50 / MS), (64.0, 1000 / MS), (2048.0, 1000 / MS)))
"""The throughput curve of a replica, which reaches 1,000 tokens per ms with 64 requests in flight."""


def main() -> None:
    count = 800 if arguments(__doc__).quick else 8000
    header("CPU of stepscope what-if", "stepscope")
    with tempfile.TemporaryDirectory() as folder:
        step = written(Path(folder), count)
        timeline = load_step(step)
        work = {
            "reading the step's files": lambda: load_step(step),
            "one change": lambda: Predicting(timeline).predict(Options(replicas="+2")),
            "five changes together": lambda: five(Predicting(timeline)),
        }
        took = {name: statistics.median(cpu_s(call) for _ in range(ROUNDS)) for name, call in work.items()}
    table(
        (f"{count:,} generations on {REPLICAS} replicas", "CPU"),
        [(name, f"{s:.2f} s") for name, s in took.items()],
    )
    verdict("one change, from the files", took["reading the step's files"] + took["one change"], 5, " s")


def five(step: Predicting) -> None:
    for options in ("+1", "+2", "x2", "-1", "-2"):
        step.predict(Options(replicas=options))


def cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def written(folder: Path, count: int) -> Path:
    """Write a step of trajectories with one generation each, which the replicas get in turn."""
    draw = random.Random(0)
    tokens = [round(draw.lognormvariate(7, 0.7)) + 1 for _ in range(count)]
    starts = sorted(draw.randrange(200 * MS) for _ in range(count))
    calls = [Call(number=place, kind="generate", start_ns=0, end_ns=0) for place in range(count)]
    played = [
        Trajectory(name="", start_ns=start, end_ns=start, phases=(Phase(0, (call,)),), rest_ns=0)
        for start, call in zip(starts, calls, strict=True)
    ]
    works = [length * draw.lognormvariate(0, 0.05) for length in tokens]
    dealt = [[place % REPLICAS] for place in range(count)]
    ends = replay(played, Rules(curve=FULL, speeds=(1.0,) * REPLICAS, works=works, assigned=dealt))
    step = StepFolder(folder)
    driver = step.process("trainer", owner=True)
    for place, (start, end, length) in enumerate(zip(starts, ends, tokens, strict=True)):
        name = f"{place}"
        above = driver.span("trajectory", start, round(end), role="agent_loop", trajectory=name)
        facts = {"tokens": length, "replica": place % REPLICAS}
        driver.span(
            "generate", start, round(end), role="rollout", parent=above, trajectory=name, attrs={**facts}
        )
    driver.close(round(max(ends)))
    return step.write()


if __name__ == "__main__":
    main()
