"""Predicted savings of changes, for advice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

from stepscope.errors import ConfigError, RecordError
from stepscope_report.timeline import Timeline
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Predicting


class Saving(NamedTuple):
    """Predicted time that a step loses by a change, in ns. Negative: it takes longer."""

    saving_ns: int
    error_ns: int
    """Half of the interval of 95 %, to its farther end."""


WhatIf: TypeAlias = Callable[[Options], Saving | None]


def no_saving(options: Options) -> None:
    """Predict nothing."""
    return


def savings_of(timeline: Timeline) -> WhatIf:
    """Return a function that predicts the saving of a change. It returns None where what-if refuses."""

    @cache
    def step() -> Predicting | None:
        try:
            return Predicting(timeline)
        except RecordError:
            return None

    @cache
    def saving(options: Options) -> Saving | None:
        predicting = step()
        if predicting is None:
            return None
        try:
            prediction = predicting.predict(options)
        except (ConfigError, RecordError):
            return None
        least_ns, most_ns = prediction.low_ns, prediction.high_ns
        error_ns = max(prediction.predicted_ns - least_ns, most_ns - prediction.predicted_ns)
        return Saving(prediction.measured_ns - prediction.predicted_ns, error_ns)

    return saving
