"""Durations of uncaptured steps in `uncaptured/*.jsonl`: one JSON object a line.

The process that opens captures writes them. It keeps only the steps near a captured one, so the file grows
with the captures and not with the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.recorder import StepLine, read_step_lines
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.reading import read_lines


class UncapturedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step, between the points at which its capture would have opened and closed."""

    step: Int
    start_ns: Int
    """Unix ns, on the clock of the process that recorded it."""
    dur_ns: Int
    """Duration by its monotonic clock."""
    first: bool = False
    """True for the first one after a capture: the export of traces may have run beside it."""
    warm_up: bool = False
    """True for the first of its loop, which pays for compiling, allocating and connecting."""


COMPARED = 40
"""The largest number of steps that a captured step is compared with."""


def uncaptured_near(
    step: StepLayout, process: ProcessInfo, run_id: str, opened_ns: int
) -> tuple[UncapturedStep, ...]:
    """Return the uncaptured steps nearest to the capture that `process` opened at `opened_ns`, by start.

    They lie in the run's folder. A step's folder outside of it has none. With the flight recorder, all steps
    of the run are known.
    """
    run = RunLayout(step.root.absolute().parent)
    recorded = {step.step: step for step in _of_recorder(read_step_lines(run.step_lines(run_id)))}
    steps = (
        recorded | {step.step: step for step in read_uncaptured(run.uncaptured(process, run_id))}
    ).values()
    near = sorted(steps, key=lambda other: abs(other.start_ns - opened_ns))[:COMPARED]
    return tuple(sorted(near, key=lambda other: other.start_ns))


def _of_recorder(lines: Sequence[StepLine]) -> Iterator[UncapturedStep]:
    for number, line in enumerate(lines):
        if not line.captured and line.error is None and line.dur_ns >= 0:
            yield UncapturedStep(
                step=line.step, start_ns=line.start_ns, dur_ns=line.dur_ns, warm_up=number == 0
            )


def read_uncaptured(path: Path) -> list[UncapturedStep]:
    """Return the readable records of the file, in the order of writing; empty if there is no file."""
    return [step for step in read_lines(path, UncapturedStep) if step.dur_ns >= 0]
