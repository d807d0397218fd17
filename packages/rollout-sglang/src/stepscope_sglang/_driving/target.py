"""Engines as their captures see them: facts to ask for, and a profiler to start and stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from stepscope.errors import EngineError
from stepscope_sglang._driving.facts import EngineFacts


class EngineDiedError(EngineError):
    """The engine has died: it writes nothing any more."""


class RefusedError(EngineError):
    """The engine understood the request and refused it."""


class AlreadyRecordingError(RefusedError):
    """The engine refused a start because its profiler runs."""


ALREADY_RECORDING = "already in progress"
"""SGLang's own words, in its refusals of a start while its profiler runs."""


def refusal(message: str, reason: str) -> RefusedError:
    """Return the error with `message` for a request that SGLang refused for `reason`, in its own words."""
    kind = AlreadyRecordingError if ALREADY_RECORDING in reason else RefusedError
    return kind(message)


class Target(Protocol):
    """Recorded engine: one of this process, or one behind HTTP.

    Its calls block, on the thread of the profiler that owns it.
    """

    remote: bool
    """The engine is not below this process: perhaps another user's, perhaps on another host."""
    engine: object
    """Equal for two targets of one engine."""

    def facts(self) -> EngineFacts: ...

    def start(self, request: Mapping[str, object]) -> None:
        """Start the profiler. Raises `RefusedError`, or EngineError if the engine cannot be reached."""
        ...

    def stop(self) -> None:
        """Stop the profiler; return when the files are written.

        Raises:
            RefusedError: nothing is being recorded.
        """
        ...

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        """Return the state of each data-parallel scheduler; empty where none shows it.

        Raises:
            EngineError: the engine cannot be reached, or not within `patience_s`.
        """
        ...
