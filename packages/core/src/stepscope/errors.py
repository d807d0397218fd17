"""The exception tree.

StepscopeError
├── ConfigError (ValueError)            a wrong setting, reported before the run
├── CaptureError (RuntimeError)         wrong use of a capture
│   ├── CaptureOpenError                a second capture while one is open in this process
│   └── MissingArtifactsError           raised by CaptureResult.raise_for_missing()
├── BackendError (RuntimeError)         a profiler of this process cannot do what was asked
│   └── ProfilerBusyError               another profiler, perhaps the user's, records this process
├── EngineError (RuntimeError)          an engine's profiler cannot do what was asked
└── RecordError (ValueError)            a file on disk is not what its name says

VerlDifference (UserWarning)            a setting of verl's that means something else here, or nothing
"""

from __future__ import annotations

from collections.abc import Iterable


class StepscopeError(Exception):
    """Base of every error that stepscope raises on purpose."""


class ConfigError(StepscopeError, ValueError):
    """A wrong setting. The message has the field, its value, the allowed values and the fix."""

    def __init__(
        self, field: str, value: object, allowed: str, fix: str, also: Iterable[ConfigError] = ()
    ) -> None:
        """
        Args:
            also: Further errors of the same source, each on a line of the message.
        """
        self.field = field
        self.value = value
        self.allowed = allowed
        self.fix = fix
        self.also = tuple(also)
        message = f"{field} is {value!r}; allowed: {allowed}. Fix: {fix}"
        super().__init__("\n".join([message, *map(str, self.also)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str, tuple[ConfigError, ...]]]:
        # Ray pickles errors. By default .args would call __init__ with one argument.
        return type(self), (self.field, self.value, self.allowed, self.fix, self.also)


class CaptureError(StepscopeError, RuntimeError):
    """Use of a capture in a way that cannot work."""


class CaptureOpenError(CaptureError):
    """A second capture beside an open one: profilers are process-wide."""


class MissingArtifactsError(CaptureError):
    """Missing artifacts of a step. The message lists each with its reason."""

    def __init__(self, step: int, missing: Iterable[str]) -> None:
        self.step = step
        self.missing = tuple(missing)
        lines = "\n  ".join(self.missing)
        super().__init__(f"step {step}: {len(self.missing)} expected artifact(s) are not there:\n  {lines}")

    def __reduce__(self) -> tuple[type[MissingArtifactsError], tuple[int, tuple[str, ...]]]:
        return type(self), (self.step, self.missing)


class BackendError(StepscopeError, RuntimeError):
    """Failure of a profiler of this process to start, stop or write."""


class ProfilerBusyError(BackendError):
    """Another profiler session in this process, beside which a second one would crash it."""


class EngineError(StepscopeError, RuntimeError):
    """Failure of an inference engine's profiler."""


class RecordError(StepscopeError, ValueError):
    """A file that does not hold the record that its name promises."""


class VerlDifference(UserWarning):
    """A setting of verl's configuration with another meaning here, or without one."""
