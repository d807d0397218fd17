"""Numbers that a trainer logs of its steps, written beside the captured ones."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import SupportsFloat, cast

from stepscope._recording.output import exporter
from stepscope._recording.process import failures, run
from stepscope.errors import ours
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.scalars import StepMetrics, write_metrics


class MetricsLog:
    """The log of one training loop. Several calls for one step add to one file."""

    def __init__(self, save_path: str | os.PathLike[str]) -> None:
        """Make a log of the run in the folder `save_path`."""
        self._layout = RunLayout(save_path)
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Keep the numbers among `values` if the step has a folder. Never raise, and write on another thread.

        Texts, tensors with several elements, NaN and infinities are left out.
        """
        if switch.DISABLED:
            return
        try:
            earlier = self._values if step == self._step else {}
            self._step, self._values = step, {**earlier, **_numbers(values)}
            metrics = StepMetrics(run_id=run.run_id(), step=step, values=self._values)
            # After the exports of the capture, which make the folder.
            exporter.exporter().then(partial(self._write, metrics), deferred=False)
        except ours() as error:
            failures.note("keeping the trainer's numbers", error)

    def _write(self, metrics: StepMetrics) -> None:
        layout = self._layout.step(metrics.step)
        if not layout.root.is_dir():
            return  # a step that is not captured
        try:
            write_metrics(layout, metrics)
        except ours(OSError) as error:
            failures.note("writing the trainer's numbers", error)


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, str):
            continue
        try:
            number = float(cast(SupportsFloat, value))
            if math.isfinite(number):
                numbers[str(name)] = number
        except ours(TypeError, ValueError, OverflowError, RuntimeError):  # no number
            continue
    return numbers
