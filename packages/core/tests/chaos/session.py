"""A driver: trains and captures, and has one fault in every other step. Prints what it found, a line a round.

    python session.py SAVE_PATH SEED FIRST COUNT [FAULT]

Exit status 0 without findings. A round that hangs prints all stacks and exits with 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from faults import Fault, World, choose
from trainer import Trainer, expected
from truth import Gone, findings, temporary_files

from stepscope import Capture, ProfileConfig, capture, prepare
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.spans import slot
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Manifest

DEADLINE_S = 3
BOUND_S = DEADLINE_S + 9
"""The longest opening or closing: the deadline, five seconds for a disk, and a busy machine."""
ROUND_S = 120
OVERLOADED = 3.0
"""Threads that want to run, for each core, from which on a late answer says nothing of stepscope. It is
printed, and is no finding.
"""


class Lost(Exception):
    """The step of the trainer could not end: an actor of it was lost."""


class Session:
    def __init__(self, save_path: Path, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.config = ProfileConfig(
            save_path=save_path,
            steps="every:1",
            roles={"*": {"ranks": "all"}},
            mode=self.rng.choice(("continuous", "discrete")),
            budget={"fanout_seconds": DEADLINE_S, "seconds": 60, "export_seconds": 30, "free_mb": 1},
            export={"when": self.rng.choice(("background", "deferred"))},
            control={"poll_seconds": 0.05},
            finish=self.rng.choice(({}, {"command": 'test -n "$STEPSCOPE_STEP_PATH"', "timeout_s": 5})),
        )
        self.layout = RunLayout(save_path)
        self.trainer = Trainer()
        self.number = 0
        self.prepare()
        self.found: list[str] = []

    def prepare(self) -> None:
        """As every trainer does once its workers are placed: a profiler's first start takes seconds."""
        prepare(workers=self.trainer.workers, engines=self.trainer.engines, config=self.config)

    def round(self, index: int, only: str | None) -> str:
        """One step with a fault and one without. Returns what was done."""
        rng = random.Random(f"{self.seed}/{index}")
        step = self.number
        world = World(self.trainer, self.layout, self.layout.step(step), rng, self.config)
        fault = choose(world, only)
        in_task = fault.in_task or (not fault.in_main and rng.random() < 0.5)
        self.capture(fault, in_task=in_task)
        self.capture(None, in_task=in_task)
        return str(fault)

    def capture(self, fault: Fault | None, *, in_task: bool) -> None:
        step, self.number = self.number, self.number + 1
        took_part = {name: known_as(name, actor) for name, actor in self.trainer.actors.items()}
        one = _Step(self, step, fault)
        try:
            try:
                asyncio.run(one.asynchronous()) if in_task else one.synchronous()
            finally:
                if fault is not None:
                    fault.end()  # what it raises in this thread may come as late as here
        except Lost:
            pass
        except BaseException as error:
            if fault is None or not isinstance(error, fault.raises):
                self.say(step, f"the training loop got {type(error).__name__}: {error}")
                raise
        gone = self.trainer.drop_the_dead()
        if gone:
            self.trainer.revive()
            self.prepare()
        self.judge(one, took_part, set(gone), fault)

    def judge(self, one: _Step, took_part: dict[str, str], gone: set[str], fault: Fault | None) -> None:
        if one.cap is None:
            return
        if slot.session() is not None:
            self.say(one.number, "the capture is closed and this process is still being recorded")
        manifest = _written_manifest(one.cap.result)
        harmed = gone if fault is None else {*gone, *fault.harmed}
        if fault is not None and fault.harmed == {"*"}:
            harmed.add("*")
        opened = fault is None or not isinstance(one.error, fault.raises) or one.reached_body
        if not opened:
            return  # rolled back, or never begun: what it says is checked where nothing was promised
        if manifest is None:
            self.say(one.number, "a step that was selected was not captured")
            return
        lost: Gone = None
        if fault is not None and fault.folder_lost:
            lost = "before the end" if (fault.struck_s or 0) < one.closing_s - 0.3 else "perhaps after it"
        for text in findings(self.layout.step(one.number), manifest, took_part, harmed, lost):
            self.say(one.number, text)
        if fault is None:
            for path in temporary_files(self.layout.root):
                self.say(one.number, f"{path} was left behind")

    def say(self, step: int, text: str) -> None:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        if "timeout: " in text and load > OVERLOADED:
            print(f"  late at step {step}, with {load:.0f} threads for each core: {text}", flush=True)
            return
        self.found.append(text)
        print(f"  FOUND at step {step}: {text}", flush=True)


class _Step:
    """One step of the training loop, as a user writes it."""

    def __init__(self, session: Session, number: int, fault: Fault | None) -> None:
        self.session = session
        self.number = number
        self.fault = fault
        self.cap: Capture | None = None
        self.error: BaseException | None = None
        self.reached_body = False
        self.began_s = 0.0
        """Start of the opening or closing, on the monotonic clock."""
        self.closing_s = 0.0
        """End of the body, on the monotonic clock."""

    def moment(self, name: str) -> None:
        if self.fault is not None:
            self.fault.start(name)

    def timed(self, what: str) -> None:
        took = time.monotonic() - self.began_s
        if took > BOUND_S:
            self.session.say(self.number, f"{what} took {took:.1f} s")

    async def asynchronous(self) -> None:
        if self.fault is not None:
            self.fault.task_begins()
        with self.around():
            async with self.new_capture():
                with self.inside():
                    self.check(await self.session.trainer.step(self.number))

    def synchronous(self) -> None:
        with self.around(), self.new_capture():
            with self.inside():
                self.check(asyncio.run(self.session.trainer.step(self.number)))

    def new_capture(self) -> Capture:
        trainer, config = self.session.trainer, self.session.config
        self.cap = capture(self.number, workers=trainer.workers, engines=trainer.engines, config=config)
        return self.cap

    @contextmanager
    def around(self) -> Iterator[None]:
        self.before()
        self.began_s = time.monotonic()
        try:
            yield
        except ray.exceptions.RayActorError as error:
            self.error = error
            raise Lost from error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.timed("closing" if self.reached_body else "opening")
            self.moment("after")

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.timed("opening")
        self.reached_body = True
        self.moment("body")
        try:
            yield
            if self.fault is not None and self.fault.in_body is not None:
                raise self.fault.in_body
        finally:
            self.moment("closing")
            self.began_s = self.closing_s = time.monotonic()

    def before(self) -> None:
        if self.fault is not None and self.fault.moment == "before":
            self.fault.start("before")
            assert self.fault._thread is not None
            self.fault._thread.join()
        self.moment("opening")

    def check(self, result: int) -> None:
        if result != expected(self.number):
            self.session.say(self.number, f"the step computed {result}, not {expected(self.number)}")


def _written_manifest(result: CaptureResult) -> Manifest | None:
    """Return the manifest once all is written, the command has run, and manifest.json has it too."""
    manifest = result.wait(20)
    until = time.monotonic() + 8
    while manifest is not None and time.monotonic() < until:
        running = any(item.pending == "running" for part in manifest.processes for item in part.expected)
        if not running and _on_disk(result) == manifest.state:
            break
        time.sleep(0.05)
        manifest = result.manifest()
    return manifest


def _on_disk(result: CaptureResult) -> str | None:
    try:
        return str(json.loads((result.path or Path()).joinpath("manifest.json").read_bytes())["state"])
    except (OSError, ValueError):
        return None


def known_as(name: str, actor: object) -> str:
    return name if name.startswith("replica") else str(actor._actor_id.hex())  # type: ignore[attr-defined]


def start_ray(folder: str) -> None:
    ray.init(
        "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=100 << 20, _temp_dir=folder,
    )  # fmt: skip


def main(save_path: str, seed: int, first: int, count: int, only: str | None = None) -> int:
    os.environ["STEPSCOPE_RAISE"] = "0"
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # for who wonders why it does not end
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind `&` ignores it
    start_ray(tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("CHAOS_TEMP", "/tmp")))
    session = Session(Path(save_path), seed)
    print("ready", flush=True)
    session.capture(None, in_task=True)
    threads = 0
    for index in range(first, first + count):
        faulthandler.dump_traceback_later(ROUND_S, exit=True)
        began, known = time.monotonic(), len(session.found)
        print(f"round {index} (--seed {seed} --first {index} --rounds 1):", end=" ", flush=True)
        done = session.round(index, only)
        new = len(session.found) - known
        print(f"{done}: {time.monotonic() - began:.1f} s{f', {new} FOUND' if new else ''}", flush=True)
        threads = threads or threading.active_count()
    faulthandler.cancel_dump_traceback_later()
    left = threading.active_count() - threads
    if left > 3:
        names = sorted(thread.name for thread in threading.enumerate())
        session.say(session.number, f"{left} threads more than after the first round: {names}")
    ray.shutdown()
    return 1 if session.found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:6]))
