"""Files of the flight recorder: orders to write steps, and a line for each step of the run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.files.clock import Int
from stepscope.files.storage import read_first, read_lines


class OrderedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step to write. Its times are in unix ns, on the clock of the process that made the order."""

    step: Int
    start_ns: Int
    end_ns: Int


WHY = "why"
"""The trigger of an order that asks for the states of processes, and not for steps."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order to every process of a run to write the recorded spans of `steps`."""

    format: Int = 1
    run_id: str
    """Id of the run, or empty for any run."""
    trigger: str
    """`slow`, `exception`, `hang`, `signal` or `request`; or `why`."""
    reason: str
    """The event that caused the order, as text."""
    made_ns: Int
    steps: tuple[OrderedStep, ...]
    offsets_ns: dict[str, Int] = {}
    """{`ProcessInfo.key`: ns by which its wall clock is ahead of the clock of the process that made the
    order}."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step in `steps_<run>.jsonl`."""

    step: Int
    start_ns: Int
    """Start of the step in unix ns."""
    dur_ns: Int
    stages: dict[str, float] = {}
    """{`role/stage`: seconds} of the top-level spans of the process that runs the training loop."""
    counters: dict[str, float] = {}
    """{name: mean} of the counters of the process that runs the training loop, and of its host; empty if the
    step took less than a second."""
    tokens: dict[str, int] = {}
    """{`rollout` or `train`: tokens} as counted by `step_tokens` in the process that runs the training
    loop."""
    captured: bool = False
    """True if the step was captured, so that it has a folder."""
    error: str | None = None


def recorded_runs(folder: Path) -> dict[str, int]:
    """Return {run id: start of its first step in unix ns} of the runs with step lines in the folder, the
    newest first. Ids are spelled as in file names.
    """
    files = {path.stem.removeprefix("steps_"): path for path in folder.glob("steps_*.jsonl")}
    first = {run: read_first(path, StepLine) for run, path in files.items()}
    starts = {run: line.start_ns for run, line in first.items() if line is not None}
    return dict(sorted(starts.items(), key=lambda item: -item[1]))


def read_step_lines(path: Path) -> list[StepLine]:
    """Return the readable lines of `steps_<run>.jsonl`, in the order of writing; empty if there is no
    file.
    """
    return read_lines(path, StepLine)
