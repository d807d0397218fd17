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
    """True if `workers` was passed, even an empty one."""
    on_request: bool
    """True if the step was requested while the run went on."""
    opened_by: OpenedBy


class Closing(NamedTuple):
    """A call that closes a capture."""

    ending: Ending | None = None
    """The cause of an early end; None if the capture ends normally."""
    deadline_s: float | None = None
    """For each worker and engine; None: `budget.fanout_seconds`."""
    discard: str | None = None
    """The reason why the recording is unwanted; None to keep it."""
