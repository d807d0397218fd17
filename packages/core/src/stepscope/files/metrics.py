"""`metrics_<run>.json`: the numbers that a trainer logged of a captured step."""

from __future__ import annotations

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one step, under the names that the trainer gave them."""

    format: int = 1
    run_id: str
    step: Int
    values: dict[str, float]


def read_metrics(step: StepLayout, run_id: str) -> dict[str, float]:
    """Return the numbers that a run's trainer logged of the step. Empty without such a file.

    Raises:
        OSError: The file cannot be read.
        RecordError: It holds something else.
    """
    try:
        return read_record(step.metrics(run_id), StepMetrics).values
    except FileNotFoundError:
        return {}


def write_metrics(step: StepLayout, metrics: StepMetrics) -> None:
    """Write the file anew."""
    write_atomic(step.metrics(metrics.run_id), msgspec.json.format(msgspec.json.encode(metrics)))
