"""Steps that no capture records: their durations, and the flight recorder if it is on."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from stepscope import switch
from stepscope.config import ProfileConfig
from stepscope.recording.recorder import baseline
from stepscope.recording.spans import slot


class Kept(Protocol):
    """The step as the flight recorder keeps it."""

    def end(self, error: object) -> None:
        """End it.

        Args:
            error: The exception that left it, or its description; None if none did.
        """
        ...


class UnselectedStep:
    """One step that is not captured, between its opening and its closing."""

    __slots__ = ("_began", "_config", "_kept", "_number", "_role")

    def __init__(self, number: int, config: ProfileConfig, role: str, kept: Kept | None) -> None:
        self._number = number
        self._config = config
        self._role = role
        self._kept = kept
        self._began = baseline.begin()

    def end(self, error: object) -> None:
        """End it, as `Kept.end`. A step that an exception cut short compares with no other."""
        if self._began is not None and error is None:
            baseline.end(self._began, step=self._number, save_path=self._config.save_path, role=self._role)
        if self._kept is not None:
            self._kept.end(error)


def begin(
    number: int, *, config: ProfileConfig, role: str, rank: int | None, workers: object, engines: object
) -> UnselectedStep | None:
    """Begin a step that is not captured. None: a capture records this process meanwhile."""
    if switch.DISABLED or slot.session() is not None:
        return None
    kept = None
    if config.record != "off":
        kept = _kept_steps().begin(number, config, role, rank, workers, engines)
    return UnselectedStep(number, config, role, kept)


def _kept_steps() -> ModuleType:
    from stepscope.recording.capture import kept_steps  # import time: it reads and writes files

    return kept_steps
