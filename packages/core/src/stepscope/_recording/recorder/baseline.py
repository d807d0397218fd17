"""Durations of uncaptured steps, for comparison with a captured one.

A step that is not selected costs two clock readings and an entry in memory. Entries become lines of a file
only near a captured step, on the exporter's thread: the last `KEPT` before it when it closes, and the next
`KEPT` after it. A run that captures nothing writes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepscope._recording import output
from stepscope._recording.process import failures, fork, shutdown
from stepscope._recording.session import activation
from stepscope._recording.spans import slot
from stepscope.errors import ours
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.storage.atomic import append_lines
from stepscope.files.uncaptured import UncapturedStep

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

KEPT = 32
"""Number of steps that are kept before a captured one, and after it."""
_WRITE_AT = (4, 16, KEPT)
"""Numbers of steps after a capture at which the steps are written: few steps write, and a killed process
loses few."""

_loops: dict[tuple[str, str], _Loop] = {}
"""{(folder, role): loop}: a process may hold several loops."""


Began: TypeAlias = tuple[int, int]
"""An uncaptured step under way: its start (monotonic ns), and the number of captures before it."""


class _Loop:
    """The steps of one training loop."""

    def __init__(self) -> None:
        self._steps: deque[UncapturedStep] = deque(maxlen=KEPT)
        """Steps that are not written to a file yet."""
        self._begun = False
        """True if a step of the loop has ended, captured or not."""
        self._file: Path | None = None
        self._since = KEPT
        """Number of steps after the last capture; counted up to `KEPT`."""

    def add(self, step: int, dur_ns: int) -> None:
        first, start_ns, warm_up = self._since == 0, time.time_ns() - dur_ns, not self._begun
        self._begun = True
        self._steps.append(
            UncapturedStep(step=step, start_ns=start_ns, dur_ns=dur_ns, first=first, warm_up=warm_up)
        )
        if self._since < KEPT:
            self._since += 1
            if self._since in _WRITE_AT:
                self._write()

    def captured(self, file: Path) -> None:
        self._file, self._since, self._begun = file, 0, True
        self._write()

    def flush(self) -> None:
        """Write the records of the steps after the last capture."""
        if self._since < KEPT:
            self._write()

    def _write(self) -> None:
        steps, self._steps = self._steps, deque(maxlen=KEPT)
        if steps and self._file is not None:
            output.exporter().then(partial(_append, self._file, tuple(steps)), deferred=False)


def begin() -> Began | None:
    """Begin an uncaptured step. Return None if it overlaps a captured one, or if recording is switched
    off."""
    if switch.DISABLED or slot.session() is not None:
        return None
    return time.monotonic_ns(), activation.activations


def end(began: Began, *, step: int, save_path: str, role: str) -> None:
    """End an uncaptured step. It is discarded if it overlapped a capture."""
    began_ns, captures = began
    dur_ns = time.monotonic_ns() - began_ns
    if captures == activation.activations:
        loop = _loops.get((save_path, role))
        if loop is None:
            loop = _loops[save_path, role] = _Loop()
        loop.add(step, dur_ns)


def captured(session: Session) -> None:
    """Note the end of a captured step. If every rank captures for itself, rank 0 keeps the uncaptured
    steps.
    """
    process, save_path = session.process, session.config.save_path
    if process.rank in (None, 0):
        loop = _loops.setdefault((save_path, process.role), _Loop())
        loop.captured(RunLayout(save_path).uncaptured(process, session.run_id))


def flush() -> None:
    """Write the records left in memory, before the exporter is drained for the last time."""
    for loop in _loops.values():
        loop.flush()


def _append(file: Path, steps: tuple[UncapturedStep, ...]) -> None:
    try:
        append_lines(file, steps)
    except ours(OSError) as error:
        failures.note("writing how long uncaptured steps took", error)


shutdown.on_exit("the durations of uncaptured steps", lambda *_: flush(), order=10)
fork.forgets("step durations", _loops.clear)
