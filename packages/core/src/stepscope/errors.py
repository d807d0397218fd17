"""The exception tree.

StepscopeError
├── ConfigError (ValueError)            a wrong setting, found before the run
├── CaptureError (RuntimeError)         a capture used wrongly
│   ├── CaptureOpenError                a second capture while one is open in this process
│   └── MissingArtifactsError           raised by CaptureResult.raise_for_missing()
├── BackendError (RuntimeError)         a profiler of this process cannot do what was asked
│   └── ProfilerBusyError               another profiler (ours or the user's) holds this process
├── EngineError (RuntimeError)          an engine's profiler cannot do what was asked
└── RecordError (ValueError)            a file on disk is not what its name says

VerlDifference (UserWarning)            a setting of verl's that means something else here, or nothing
"""

from __future__ import annotations

from collections.abc import Iterable


class StepscopeError(Exception):
    """Every error that stepscope raises on purpose."""


class ConfigError(StepscopeError, ValueError):
    """A setting is wrong. Says which field, what was found, what is allowed and how to fix it."""

    def __init__(
        self, field: str, value: object, allowed: str, fix: str, also: Iterable[ConfigError] = ()
    ) -> None:
        """Args: also: what else is wrong in the same source, each on a line of the message."""
        self.field = field
        self.value = value
        self.allowed = allowed
        self.fix = fix
        self.also = tuple(also)
        said = f"{field} is {value!r}; allowed: {allowed}. Fix: {fix}"
        super().__init__("\n".join([said, *map(str, self.also)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str, tuple[ConfigError, ...]]]:
        # Exceptions unpickle from .args by default: that would call __init__ with one argument (Ray ships
        # errors).
        return type(self), (self.field, self.value, self.allowed, self.fix, self.also)


class CaptureError(StepscopeError, RuntimeError):
    """A capture is used in a way that cannot work."""


class CaptureOpenError(CaptureError):
    """A capture is open in this process and profilers are process-wide, so a second one cannot start."""


class MissingArtifactsError(CaptureError):
    """Expected artifacts are not there. The message lists each with its reason."""

    def __init__(self, step: int, missing: Iterable[str]) -> None:
        self.step = step
        self.missing = tuple(missing)
        lines = "\n  ".join(self.missing)
        super().__init__(f"step {step}: {len(self.missing)} expected artifact(s) are not there:\n  {lines}")

    def __reduce__(self) -> tuple[type[MissingArtifactsError], tuple[int, tuple[str, ...]]]:
        return type(self), (self.step, self.missing)


class BackendError(StepscopeError, RuntimeError):
    """A profiler of this process cannot start, stop or write."""


class ProfilerBusyError(BackendError):
    """Another profiler session is running in this process; starting a second one would crash it."""


class EngineError(StepscopeError, RuntimeError):
    """An inference engine's profiler cannot do what was asked."""


class RecordError(StepscopeError, ValueError):
    """A record file cannot be read as what its name says. Carries the path in the message."""


class VerlDifference(UserWarning):
    """A setting of verl's configuration that means something else here, or nothing."""
