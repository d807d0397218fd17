"""Steps of a program in which it plants a culprit, and the time that this took by its own clock."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

from stepscope import configure

SECONDS = 0.5
"""Time that a culprit takes, in steps that take half as long without it."""
REGULAR = "evaluation in each fifth step"
"""A step of another kind, which takes longer and is as it should be."""
_PART = mmap(-1, 1 << 21)  # at a page, as direct writes need
_BLKIO = Path("/sys/fs/cgroup/blkio")


class Plan:
    """Steps of a program, some of which have a culprit.

    Args:
        runs: Number of steps with a culprit. They have no rhythm, and each has normal steps around it.
    """

    def __init__(self, folder: Path, culprit: str, runs: int) -> None:
        self.folder = folder
        self.culprit = culprit
        draw = random.Random(culprit)
        self.planted = list[int]()
        at = 4
        for _ in range(runs):
            at += 5 if culprit == REGULAR else draw.randint(4, 7)
            self.planted.append(at)
        self.steps = range(at + 3)
        self.step = 0
        self.hosts = dict[int, str]()
        """{step: host of the learner that took longest by its own clock}."""
        self._took_ns = Counter[int]()
        self._without_cores_ns = Counter[int]()

    def configure(self) -> None:
        """Capture each planted step and the one before it, without profilers."""
        captured = [step - before for step in self.planted for before in (1, 0)]
        configure(
            save_path=str(self.folder), steps=captured, record="spans", roles={"*": {"profiler": "off"}}
        )

    @property
    def now(self) -> bool:
        """Return whether the present step has the culprit."""
        return self.step in self.planted

    def each(self) -> Iterator[int]:
        """Yield the steps, and ask the kernel how long the host had too few cores in each."""
        for step in self.steps:
            self.step = step
            began_ns = _without_cores_ns()
            yield step
            self._without_cores_ns[step] = _without_cores_ns() - began_ns

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Add the time of the block to what the culprit takes in this step."""
        began_ns = time.perf_counter_ns()
        yield
        self.add(time.perf_counter_ns() - began_ns)

    def add(self, ns: int, step: int | None = None) -> None:
        """Add a time to what the culprit takes in a step, by default in this one."""
        self._took_ns[self.step if step is None else step] += ns

    def write(self) -> None:
        """Write what this process' own clock says of each step."""
        times = {"planted": self._took_ns, "without cores": self._without_cores_ns}
        if self.hosts:
            (self.folder / "hosts.json").write_text(json.dumps(self.hosts))
        (self.folder / f"clock-{os.getpid()}.json").write_text(json.dumps(times))


def own_clock(folder: Path, what: str) -> Counter[int]:
    """Return {step: the longest time of a process}, by the processes' own clocks.

    Args:
        what: `planted`, or `without cores`.
    """
    longest = Counter[int]()
    for path in folder.glob("clock-*.json"):
        longest |= Counter({int(step): ns for step, ns in json.loads(path.read_text())[what].items()})
    return longest


def _without_cores_ns() -> int:
    """Return how long some program of the host has had work and no core, by the kernel's PSI."""
    some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    return int(some.rpartition("total=")[2]) * 1000


def sleep(seconds: float) -> None:
    """Sleep for about as long, as work varies: by at most 4 % of it."""
    time.sleep(seconds * random.uniform(0.96, 1.04))


_garbage: list[list[object]] = []


def hold(objects: int) -> None:
    """Hold objects that each full run of the collector visits."""
    _garbage.extend([] for _ in range(objects))


def collect() -> None:
    """Run the collector until it has stopped this process for `SECONDS`."""
    until_ns = time.perf_counter_ns() + SECONDS * 1e9
    while time.perf_counter_ns() < until_ns:
        gc.collect()


def write_file(path: Path) -> None:
    """Write 2 MB to the disk, and wait for it."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.pwrite(file, _PART, 0)
    os.close(file)


@contextmanager
def slow_disk(folder: Path) -> Iterator[None]:
    """Let the kernel slow down the folder's disk for this process, so that `write_file` takes `SECONDS`. This
    takes root and version 1 of cgroups.
    """
    device, group = os.stat(folder).st_dev, _BLKIO / f"stepscope-culprits-{os.getpid()}"
    group.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {round(len(_PART) / SECONDS)}"
    (group / "blkio.throttle.write_bps_device").write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
