"""Figures of a step: figures of a report (`scalars_<run>.json`), and numbers that the trainer logs
(`metrics_<run>.json`).
"""

from __future__ import annotations

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import StepLayout
from stepscope.files.storage import read_record, write_atomic


class StepScalars(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that a report computes for one step. `on_report` hooks get this object."""

    format: int = 1
    run_id: str
    step: int
    opened_ns: int
    """Unix time in ns at which the capture opened."""
    values: dict[str, float]
    """{name: value}: `step/wall_seconds`, `stage/<role>/<stage>_seconds`, `idle/<role>_seconds`..."""
    written: dict[str, str | None] = {}
    """{writer: None if it has written the figures, or the reason of its failure}."""


def read_scalars(step: StepLayout, run_id: str) -> StepScalars:
    """Return the figures of the step in a run.

    Raises:
        OSError: there is no such file.
        RecordError: the file contains something else.
    """
    return read_record(step.scalars(run_id), StepScalars)


def write_scalars(step: StepLayout, scalars: StepScalars) -> None:
    write_atomic(step.scalars(scalars.run_id), msgspec.json.format(msgspec.json.encode(scalars)))


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that the trainer logged for one step, under the trainer's names."""

    format: int = 1
    run_id: str
    step: Int
    values: dict[str, float]


def read_metrics(step: StepLayout, run_id: str) -> dict[str, float]:
    """Return the numbers that the trainer logged for the step; empty if there is no file.

    Raises:
        OSError: The file cannot be read.
        RecordError: The file contains something else.
    """
    try:
        return read_record(step.metrics(run_id), StepMetrics).values
    except FileNotFoundError:
        return {}


def write_metrics(step: StepLayout, metrics: StepMetrics) -> None:
    """Write the file of the step's metrics, replacing an earlier one."""
    write_atomic(step.metrics(metrics.run_id), msgspec.json.format(msgspec.json.encode(metrics)))
