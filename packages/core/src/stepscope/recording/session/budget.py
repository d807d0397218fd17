"""Limits of a capture and of a run: watched from beside it, looked at before it, and kept after it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from stepscope.config import BudgetConfig, ProfileConfig
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.storage.atomic import private
from stepscope.recording.process import failures

POLL_S = 0.5
"""Between two looks at the memory of the process (20 us each)."""
MB = 1 << 20
_kept: set[str] = set()
"""Runs in which an old step had to stay. One writer: `retain`."""


class Watchdog:
    """Calls `expired(reason)` once, on a thread of its own, when the capture reaches a limit."""

    def __init__(self, budget: BudgetConfig, expired: Callable[[str], None]) -> None:
        self._budget = budget
        self._expired = expired
        self._cancelled = threading.Event()
        self._until = time.monotonic() + budget.seconds
        self._began_mb = resident_mb()
        self.thread = threading.Thread(target=self._run, name="stepscope-watchdog", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        limit_mb = self._budget.memory_mb
        while True:
            left_s = self._until - time.monotonic()
            if self._cancelled.wait(left_s if limit_mb is None else min(left_s, POLL_S)):
                return
            reason = self._reached()
            if reason is not None:
                self._expired(reason)
                return

    def _reached(self) -> str | None:
        if time.monotonic() >= self._until:
            return f"budget.seconds: open for more than {self._budget.seconds:g} s"
        limit_mb, now_mb = self._budget.memory_mb, resident_mb()
        if (
            limit_mb is None
            or now_mb is None
            or self._began_mb is None
            or now_mb - self._began_mb <= limit_mb
        ):
            return None
        return f"budget.memory_mb: the process grew by {now_mb - self._began_mb} MB, {limit_mb} allowed"


def resident_mb() -> int | None:
    """The memory of this process that is resident; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") // MB


def over_budget(config: ProfileConfig) -> str | None:
    """Why no trace should be added to the run's folder now; None when there is room."""
    run, budget = RunLayout(config.save_path), config.budget
    folder = run.root.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free // MB
    if free < budget.free_mb:
        return f"budget.free_mb: {free} MB are free in {run.root}, {budget.free_mb} wanted"
    if budget.run_trace_mb is not None:
        written = sum(_sizes(step.traces) for step in run.steps().values()) // MB
        if written >= budget.run_trace_mb:
            return f"budget.run_trace_mb: {written} MB lie in {run.root}, {budget.run_trace_mb} allowed"
    return None


def _sizes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # removed or renamed meanwhile
    return total


def retain(
    run: RunLayout,
    run_id: str,
    keep: int,
    *,
    busy: Collection[int] = (),
    may_go: Callable[[StepLayout], bool] = lambda _: True,
) -> list[int]:
    """Removes the oldest captured steps of this run, so that `keep` are left. Other runs' are not touched.

    Args:
        busy: Steps that are left for the next time: what is done after their capture is not done.
        may_go: False for a step that would be lost: its copy in the mirror is not whole.

    Returns:
        The steps removed, which also stand in `removed.txt`.
    """
    opened = {number: at for number, step in run.steps().items() if (at := _opened(step, run_id)) is not None}
    oldest = sorted(opened, key=lambda number: opened[number])[: max(0, len(opened) - keep)]
    idle = [number for number in oldest if number not in busy]
    kept = [number for number in idle if not may_go(run.step(number))]
    if kept and str(run.root) not in _kept:
        _kept.add(str(run.root))
        failures.warn(
            "stepscope: budget.keep_steps leaves step %s (said once): finish.mirror has no whole copy of it. "
            "Its manifest says why; `stepscope mirror %s` tries again",
            ", ".join(map(str, kept)),
            run.root,
        )
    return [number for number in idle if number not in kept and _remove(run, number, keep)]


def _remove(run: RunLayout, number: int, keep: int) -> bool:
    try:
        shutil.rmtree(run.step(number).root)
        with open(run.removed, "a", opener=private) as file:
            file.write(f"step {number}: removed at {time.time_ns()} (unix ns); budget.keep_steps is {keep}\n")
    except OSError as error:
        failures.note("removing an old step", error)
        return False
    return True


def _opened(step: StepLayout, run_id: str) -> int | None:
    """When this run opened its capture of the step; None when anybody else's recordings lie there too."""
    parts, unreadable = read_parts(step)
    if unreadable or any(part.run_id != run_id for part in parts):
        return None
    owners: Iterator[int] = (part.opened.wall_ns for part in parts if part.owner)
    return min(owners, default=None)
