"""A driver whose flight recorder is told to write while something happens. Prints a line a round.

    python dumps.py SAVE_PATH SEED FIRST COUNT [FAULT]

Exit status 0 without findings. Each round runs steps that nobody captures, has them written with a fault, and
once more without one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

import ray
from faults import FAULTS, WORKERS, Fault, World
from session import ROUND_S, known_as, start_ray
from trainer import Trainer, expected
from truth import findings, temporary_files

from stepscope import ProfileConfig, capture
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.recorder import Recorder
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import fold, read_parts

STEPS = 3
"""Steps of a dump."""
NAMES = ("kill", "full_disk", "clock_jump", "two_triggers")


class Session:
    def __init__(self, save_path: Path, seed: int) -> None:
        self.seed = seed
        self.config = ProfileConfig.from_mapping(
            {
                "save_path": str(save_path),
                "record": "spans",
                "recorder": {"triggers": [], "then_capture": 0, "memory_mb": 4},
                "control": {"poll_seconds": 0.05},
            }
        )
        self.layout = RunLayout(save_path)
        self.trainer = Trainer()
        self.number = 0
        self.found: list[str] = []
        self.start()

    def start(self) -> None:
        """Run a step: the first one tells the workers, in the background."""
        self.train(1)
        until = time.monotonic() + 60
        while len(self.recorder.workers) < len(WORKERS) and time.monotonic() < until:
            time.sleep(0.05)

    def participants(self) -> dict[str, str]:
        return {name: known_as(name, self.trainer.actors[name]) for name in WORKERS}

    @property
    def recorder(self) -> Recorder:
        recorder = standing.standing()
        assert recorder is not None
        return recorder

    def train(self, steps: int) -> range:
        """Run steps, and return their numbers."""
        first = self.number
        for self.number in range(first, first + steps):
            with capture(self.number, config=self.config, workers=self.trainer.workers):
                result = asyncio.run(self.trainer.step(self.number))
            if result != expected(self.number):
                self.say(self.number, f"the step computed {result}, not {expected(self.number)}")
        self.number += 1
        return range(first, self.number)

    def round(self, index: int, only: str | None) -> str:
        """Have steps written with a fault, and then others without one. Return what was done."""
        rng = random.Random(f"{self.seed}/{index}")
        name = only or rng.choice(NAMES)
        took_part = self.participants()
        numbers = self.train(STEPS)
        fault = self.fault(name, rng, numbers[0])
        fault.start("dump")
        self.recorder.write_last(STEPS)
        fault.end()
        self.settle()
        self.judge(numbers, took_part, fault)
        if self.trainer.drop_the_dead():
            self.trainer.revive()
            standing.stop()
            self.start()
            took_part = self.participants()
        numbers = self.train(STEPS)
        if self.recorder.write_last(STEPS) != list(numbers):
            self.say(numbers[-1], "steps were not taken to be written, though nobody else took them")
        self.settle()
        self.judge(numbers, took_part, None)
        for path in temporary_files(self.layout.root):
            self.say(numbers[-1], f"{path} was left behind")
        return str(fault)

    def fault(self, name: str, rng: random.Random, number: int) -> Fault:
        """Return a fault that harms somebody who records, to strike when the steps are written."""
        world = World(self.trainer, self.layout, self.layout.step(number), rng, self.config)
        fault = two_triggers() if name == "two_triggers" else FAULTS[name](world)
        while fault.harmed and not {*WORKERS, "driver", "*"} & set(fault.harmed):
            fault = FAULTS[name](world)
        fault.name, fault.moment = f"{name} {fault.name}".strip(), "dump"
        fault.delay_s = rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)))
        return fault

    def settle(self) -> None:
        # Its own `drain` is for the end of the process, and waits for no worker.
        if self.recorder._work.drain(30):
            self.say(self.number, "the recorder was still writing after 30 s")

    def judge(self, numbers: Collection[int], took_part: dict[str, str], fault: Fault | None) -> None:
        harmed = set() if fault is None else set(fault.harmed)
        for number in numbers:
            step = self.layout.step(number)
            parts, _ = read_parts(step)
            if not parts:
                if not harmed & {"driver", "*"}:
                    self.say(number, "a step that was ordered was not written")
                continue
            manifest = fold(parts)
            if manifest.recorder is None:
                self.say(number, "the manifest does not name the flight recorder")
            for text in findings(step, manifest, took_part, harmed):
                self.say(number, text)

    def say(self, step: int, text: str) -> None:
        self.found.append(text)
        print(f"  FOUND at step {step}: {text}", flush=True)


def two_triggers() -> Fault:
    """Order the same steps a second time, at the same moment."""

    def strike() -> None:
        recorder = standing.standing()
        assert recorder is not None
        recorder.write_last(STEPS)

    return Fault("", "dump", strike)


def main(save_path: str, seed: int, first: int, count: int, only: str | None = None) -> int:
    os.environ["STEPSCOPE_RAISE"] = "0"
    faulthandler.enable()
    start_ray(tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("CHAOS_TEMP", "/tmp")))
    session = Session(Path(save_path), seed)
    print("ready", flush=True)
    threads = threading.active_count()
    for index in range(first, first + count):
        faulthandler.dump_traceback_later(ROUND_S, exit=True)
        began = time.monotonic()
        print(f"round {index} (--seed {seed} --first {index} --rounds 1):", end=" ", flush=True)
        print(f"{session.round(index, only)}: {time.monotonic() - began:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if threading.active_count() > threads + 3:
        session.say(session.number, f"threads: {sorted(thread.name for thread in threading.enumerate())}")
    standing.stop()
    ray.shutdown()
    return 1 if session.found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:6]))
