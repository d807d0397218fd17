"""`scalars_<run>.json`: a step's figures for curves, and whom they were given to."""

from __future__ import annotations

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record


class StepScalars(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_report` hooks get."""

    format: int = 1
    run_id: str
    step: int
    opened_ns: int
    """When the capture opened, unix ns."""
    values: dict[str, float]
    """Seconds by name: `step/wall_seconds`, `stage/<role>/<stage>_seconds`, `idle/<role>_seconds`..."""
    written: dict[str, str | None] = {}
    """Writer -> why it failed; None: it has them."""


def read_scalars(step: StepLayout, run_id: str) -> StepScalars:
    """Raises OSError or ValueError: they are not there, or are none."""
    return read_record(step.scalars(run_id), StepScalars)


def write_scalars(step: StepLayout, scalars: StepScalars) -> None:
    write_atomic(step.scalars(scalars.run_id), msgspec.json.format(msgspec.json.encode(scalars)))
