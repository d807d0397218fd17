"""Requests to capture one step, and to close its capture."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.config import ProfileConfig
from stepscope.files.manifest.records import Ending, OpenedBy


class Asked(NamedTuple):
    """A step to capture, and who takes part."""

    step: int
    config: ProfileConfig
    workers: object
    engines: object
    role: str
    rank: int | None
    names_workers: bool
    """True if `workers` was passed, if only to say that there are none."""
    on_request: bool
    """True if somebody asked for the step while the run went on."""
    opened_by: OpenedBy


class Closing(NamedTuple):
    """A call that closes."""

    ending: Ending | None = None
    """Why the capture ends early; None if it does not."""
    deadline_s: float | None = None
    """For each worker and engine; None: `budget.fanout_seconds`."""
    discard: str | None = None
    """Why what was recorded is unwanted; None to keep it."""
