"""Soak: the demo's trainer runs on, every third step is captured, and nothing of any process may grow.

    python soak.py [--minutes 60] [--keep 3] [--steps N]

After each captured step, once its files are written, of every process (the driver, each actor): resident
memory, open files, threads, children; of the run: the bytes in its folder, where `budget.keep_steps` steps
are kept. At the end a line is laid through each series, without its first quarter (warming up); what it grows
by over the rest of the run must stay below what is allowed. Exit status 0 when all is flat.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from stepscope import ProfileConfig, aprepare, capture
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.trainer import WARM_UP, Trainer, start_ray

EVERY = 3
LEAST = 8
"""Samples below which nothing can be said."""
ALLOWED = {"MB": 30.0, "files": 2.0, "threads": 2.0, "children": 1.0}
"""The largest growth of a series, in its unit; memory may also grow by 5 %."""
MEMORY_SHARE = 0.05
DISK_SHARE = 0.25
"""Traces of one step and the next differ in size."""


@dataclass
class Series:
    name: str
    unit: str
    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def grown(self) -> float:
        """By the line through what is left without the first quarter, over its length."""
        skip = len(self.values) // 4
        at, values = self.at[skip:], self.values[skip:]
        return statistics.linear_regression(at, values).slope * (at[-1] - at[0])

    def allowed(self) -> float:
        middle = statistics.median(self.values)
        if self.name == "disk":
            return DISK_SHARE * middle
        return max(ALLOWED[self.unit], MEMORY_SHARE * middle if self.unit == "MB" else 0)

    @property
    def is_flat(self) -> bool:
        return self.grown() <= self.allowed()


class Watch:
    """The series of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: dict[tuple[str, str], Series] = {}
        self.began = time.monotonic()

    def look(self, pids: dict[str, int]) -> None:
        at = time.monotonic() - self.began
        for name, pid in pids.items():
            for unit, value in measure(pid).items():
                self._add(at, name, unit, value)
        self._add(at, "disk", "MB", sum(_size(path) for path in self.folder.rglob("*")) / 1e6)

    def _add(self, at: float, name: str, unit: str, value: float) -> None:
        self.series.setdefault((name, unit), Series(name, unit)).add(at, value)

    def verdict(self) -> bool:
        """Print the table and return whether all is flat."""
        print(f"\n{'':16} {'':9} {'first':>9} {'median':>9} {'last':>9} {'grows by':>9} {'allowed':>9}")
        for series in self.series.values():
            first, last, middle = series.values[0], series.values[-1], statistics.median(series.values)
            print(
                f"{series.name:16} {series.unit:9} {first:9.1f} {middle:9.1f} {last:9.1f} "
                f"{series.grown():9.2f} {series.allowed():9.1f}  {'flat' if series.is_flat else 'GROWS'}"
            )
        growing = [series for series in self.series.values() if not series.is_flat]
        samples = len(next(iter(self.series.values())).values)
        verdict = "all flat" if not growing else f"{len(growing)} of {len(self.series)} series grow"
        print(f"soak: {samples} captures in {self.series_minutes():.0f} min: {verdict}")
        return not growing

    def series_minutes(self) -> float:
        return next(iter(self.series.values())).at[-1] / 60

    @property
    def samples(self) -> int:
        return len(next(iter(self.series.values())).values) if self.series else 0


def measure(pid: int) -> dict[str, float]:
    """Return figures of one process, read from /proc."""
    process = Path("/proc", str(pid))
    pages = int((process / "statm").read_text().split()[1])
    tasks = [task.name for task in (process / "task").iterdir()]
    children = sum(len((process / "task" / task / "children").read_text().split()) for task in tasks)
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": len(list((process / "fd").iterdir())),
        "threads": len(tasks),
        "children": children,
    }


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # renamed this moment


def pid_of(instance: object) -> int:
    return os.getpid()


async def run(folder: Path, minutes: float, keep: int, steps: int | None) -> bool:
    config = ProfileConfig(
        save_path=folder,
        steps=f"every:{EVERY}",
        roles={"rollout": {"ranks": "all", "engine": {"iterations": {"count": 200}}}, "*": {"ranks": "all"}},
        budget={"keep_steps": keep},
        finish={"command": 'test -f "$STEPSCOPE_STEP_PATH/manifest.json"'},
    )
    until = time.monotonic() + 60 * minutes
    async with Calculator() as calculator:
        trainer = Trainer(calculator, 0, config)
        await trainer.set_up(WARM_UP)
        await aprepare(workers=trainer.workers, engines=trainer.engines, config=config)
        actors = {
            **{f"actor {rank}": actor for rank, actor in enumerate(trainer.actors)},
            "reference": trainer.reference,
            **{f"replica {number}": replica for number, replica in enumerate(trainer.replicas)},
        }
        pids = {name: await actor.__ray_call__.remote(pid_of) for name, actor in actors.items()}
        watch, step = Watch(folder), 0
        while time.monotonic() < until if steps is None else step < steps:
            async with capture(step, workers=trainer.workers, engines=trainer.engines, config=config) as cap:
                result = await trainer.step(step)
            if cap.selected:
                await asyncio.to_thread(cap.result.raise_for_missing)
                watch.look({"driver": os.getpid(), **pids})
                print(f"{watch.series_minutes():5.1f} min, step {step}: {result}", flush=True)
            step += 1
        await trainer.shut_down()
    if watch.samples < LEAST:
        print(f"soak: {watch.samples} captures say nothing; {LEAST} are the least. Fix: more --minutes")
        return False
    return watch.verdict()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--keep", type=int, default=3, help="budget.keep_steps")
    parser.add_argument("--steps", type=int, help="so many instead of --minutes")
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="stepscope-soak-"))
    start_ray()
    try:
        return 0 if asyncio.run(run(folder, chosen.minutes, chosen.keep, chosen.steps)) else 1
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
