"""Files of the flight recorder: the orders to write steps, and one line for each step of the run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.files.clock import Int
from stepscope.files.storage.reading import read_first, read_lines


class OrderedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step to write, with its times in unix ns on the clock of the process that bounds steps."""

    step: Int
    start_ns: Int
    end_ns: Int


WHY = "why"
"""The trigger of an order for the states of all processes, and for no step."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order to every process of a run: write what you recorded of these steps."""

    format: Int = 1
    run_id: str
    """Id of the run that the order is for, or empty for any run."""
    trigger: str
    """`slow`, `exception`, `hang`, `signal` or `request`; or `why`."""
    reason: str
    """The event that caused the order, as text."""
    made_ns: Int
    steps: tuple[OrderedStep, ...]
    offsets_ns: dict[str, Int] = {}
    """{`ProcessInfo.key`: lead of its wall clock over that of the process that made the order}."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step in `steps_<run>.jsonl`."""

    step: Int
    start_ns: Int
    """Start of the step in unix ns."""
    dur_ns: Int
    stages: dict[str, float] = {}
    """{`role/stage`: seconds} of the spans at the top of the process that bounds steps."""
    counters: dict[str, float] = {}
    """{name: mean} of the counters of the process that bounds steps, and of its host; empty for a step
    shorter than a second."""
    tokens: dict[str, int] = {}
    """{`rollout` or `train`: tokens} that `step_tokens` counted in the process that bounds steps."""
    captured: bool = False
    """True if the step has a folder with traces of its profilers."""
    error: str | None = None


def recorded_runs(folder: Path) -> dict[str, int]:
    """Return {id, as in file names: start of its first kept step, unix ns} of the runs with lines in the
    folder, the newest first.
    """
    files = {path.stem.removeprefix("steps_"): path for path in folder.glob("steps_*.jsonl")}
    first = {run: read_first(path, StepLine) for run, path in files.items()}
    starts = {run: line.start_ns for run, line in first.items() if line is not None}
    return dict(sorted(starts.items(), key=lambda item: -item[1]))


def read_step_lines(path: Path) -> list[StepLine]:
    """Return the readable lines of `steps_<run>.jsonl`, in the order of writing; empty without a file."""
    return read_lines(path, StepLine)
