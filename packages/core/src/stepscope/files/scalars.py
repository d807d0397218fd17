"""A step's figures for curves (`scalars_<run>.json`), and its trainer's own (`metrics_<run>.json`)."""

from __future__ import annotations

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record


class StepScalars(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step; the argument of `on_report` hooks."""

    format: int = 1
    run_id: str
    step: int
    opened_ns: int
    """Unix time in ns at which the capture opened."""
    values: dict[str, float]
    """Seconds by name: `step/wall_seconds`, `stage/<role>/<stage>_seconds`, `idle/<role>_seconds`..."""
    written: dict[str, str | None] = {}
    """{writer: reason of its failure}, or None if it has the figures."""


def read_scalars(step: StepLayout, run_id: str) -> StepScalars:
    """Return a run's figures of the step.

    Raises:
        OSError: there are none.
        RecordError: the file holds something else.
    """
    return read_record(step.scalars(run_id), StepScalars)


def write_scalars(step: StepLayout, scalars: StepScalars) -> None:
    write_atomic(step.scalars(scalars.run_id), msgspec.json.format(msgspec.json.encode(scalars)))


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one step, under the names that the trainer gave them."""

    format: int = 1
    run_id: str
    step: Int
    values: dict[str, float]


def read_metrics(step: StepLayout, run_id: str) -> dict[str, float]:
    """Return the numbers that a run's trainer logged for the step. Empty without such a file.

    Raises:
        OSError: The file cannot be read.
        RecordError: The file holds something else.
    """
    try:
        return read_record(step.metrics(run_id), StepMetrics).values
    except FileNotFoundError:
        return {}


def write_metrics(step: StepLayout, metrics: StepMetrics) -> None:
    """Write the file of the step's metrics, replacing an earlier one."""
    write_atomic(step.metrics(metrics.run_id), msgspec.json.format(msgspec.json.encode(metrics)))
