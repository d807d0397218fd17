"""Interface of an engine to its captures: its facts, and the start and stop of its profiler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from stepscope.errors import EngineError
from stepscope_sglang._driving.facts import EngineFacts


class EngineDiedError(EngineError):
    """The engine has died, so it writes no more files."""


class RefusedError(EngineError):
    """The engine understood the request and refused it."""


class AlreadyRecordingError(RefusedError):
    """The engine refused a start because its profiler runs."""


ALREADY_RECORDING = "already in progress"
"""SGLang's own words when it refuses a start because its profiler runs."""


def refusal(message: str, reason: str) -> RefusedError:
    """Return the error `message` for a request that SGLang refused for `reason`, which is in SGLang's
    words.
    """
    kind = AlreadyRecordingError if ALREADY_RECORDING in reason else RefusedError
    return kind(message)


class Target(Protocol):
    """An engine that can be recorded: one in this process, or one behind HTTP.

    Its methods block. They are called on the thread of the profiler that owns the target.
    """

    remote: bool
    """True if the engine is not a child of this process: it may belong to another user, or run on another
    host."""
    engine: object
    """Identity of the engine: two targets of the same engine have equal values."""

    def facts(self) -> EngineFacts: ...

    def start(self, request: Mapping[str, object]) -> None:
        """Start the profiler. Raises `RefusedError`, or EngineError if the engine cannot be reached."""
        ...

    def stop(self) -> None:
        """Stop the profiler, and return when the files are written.

        Raises:
            RefusedError: nothing is being recorded.
        """
        ...

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        """Return the state of each data-parallel scheduler; empty if the schedulers do not show it.

        Raises:
            EngineError: the engine does not answer within `patience_s`.
        """
        ...
