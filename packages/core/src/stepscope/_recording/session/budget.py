"""Limits of a capture, watched while it is open, and limits of a run's folder, checked before a capture."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stepscope._recording.counters.load import ProcessMemory
from stepscope.config import BudgetConfig, ProfileConfig
from stepscope.errors import ours
from stepscope.files.layout import RunLayout

POLL_S = 0.5
"""Interval between two measurements of the process' memory. A measurement takes 20 us."""
MB = 1 << 20


class Watchdog:
    """Watchdog of a capture. When a limit is reached, it calls `expired(reason)` once, on its own thread."""

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
        if limit_mb is None or now_mb is None or self._began_mb is None:
            return None
        grown_mb = now_mb - self._began_mb
        if grown_mb <= limit_mb:
            return None
        return f"budget.memory_mb: the process grew by {grown_mb} MB, {limit_mb} allowed"


def resident_mb() -> int | None:
    """Return the resident memory of this process in MB, or None if the system does not report it."""
    try:
        return int(ProcessMemory().sample()[""]) // MB
    except ours(OSError):
        return None


def over_budget(config: ProfileConfig) -> str | None:
    """Return the reason why no further traces may be written into the run's folder, or None."""
    run, budget = RunLayout(config.save_path), config.budget
    folder = run.root.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free // MB
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
            except ours(OSError):
                continue  # removed or renamed meanwhile
    return total
