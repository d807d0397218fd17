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

`ours` and `is_users` distinguish errors of stepscope from exceptions that are meant for the user's code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import TypeVar, overload

E = TypeVar("E", bound=Exception)


class StepscopeError(Exception):
    """Base of every error that stepscope raises on purpose."""


class ConfigError(StepscopeError, ValueError):
    """A wrong setting. The message states the field, its value, the allowed values and the fix."""

    def __init__(
        self, field: str, value: object, allowed: str, fix: str, also: Iterable[ConfigError] = ()
    ) -> None:
        """
        Args:
            also: Further errors of the same source. Each adds a line to the message.
        """
        self.field = field
        self.value = value
        self.allowed = allowed
        self.fix = fix
        self.also = tuple(also)
        message = f"{field} is {value!r}; allowed: {allowed}. Fix: {fix}"
        super().__init__("\n".join([message, *map(str, self.also)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str, tuple[ConfigError, ...]]]:
        # Ray pickles errors. By default, unpickling would call __init__ with one argument, the message.
        return type(self), (self.field, self.value, self.allowed, self.fix, self.also)


class CaptureError(StepscopeError, RuntimeError):
    """Wrong use of a capture."""


class CaptureOpenError(CaptureError):
    """A second capture was opened while another is open in this process. Profilers are process-wide."""


class MissingArtifactsError(CaptureError):
    """Missing artifacts of a captured step. The message lists each with its reason."""

    def __init__(self, step: int, missing: Iterable[str]) -> None:
        self.step = step
        self.missing = tuple(missing)
        lines = "\n  ".join(self.missing)
        super().__init__(f"step {step}: {len(self.missing)} expected artifact(s) are not there:\n  {lines}")

    def __reduce__(self) -> tuple[type[MissingArtifactsError], tuple[int, tuple[str, ...]]]:
        return type(self), (self.step, self.missing)


class BackendError(StepscopeError, RuntimeError):
    """A profiler of this process failed to start, to stop or to write."""


class ProfilerBusyError(BackendError):
    """Another profiler session is open in this process; a second session would crash the process."""


class EngineError(StepscopeError, RuntimeError):
    """The profiler of an inference engine failed."""


class RecordError(StepscopeError, ValueError):
    """A file whose content does not match its name."""


class VerlDifference(UserWarning):
    """A setting of verl's configuration that has another meaning in stepscope, or no counterpart."""


@overload
def ours() -> tuple[type[Exception], ...]: ...
@overload
def ours(*kinds: type[E]) -> tuple[type[E], ...]: ...
def ours(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exception types that an `except` in stepscope's code may catch: `kinds`, or `Exception` by
    default.

    Write `except ours() as error:` instead of `except Exception as error:`. Exceptions that are meant for the
    user's code (see `is_users`) are not caught. Python evaluates the call only when an exception was raised.
    """
    error = sys.exc_info()[1]
    return () if error is not None and is_users(error) else kinds or (Exception,)


def is_users(error: BaseException) -> bool:
    """Return whether an exception that was raised inside stepscope's code is meant for the user's code.

    Such exceptions are Ctrl-C, exit and cancellation; exceptions that a signal handler raises, such as the
    timeout of a reward function; and exceptions that are thrown into a thread with
    `PyThreadState_SetAsyncExc`.
    """
    if not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    while trace is not None:
        if _is_called_with_its_caller(trace.tb_frame):
            return True
        if trace.tb_next is None:
            return _is_thrown(error, trace)
        trace = trace.tb_next
    return False


def _is_called_with_its_caller(frame: FrameType) -> bool:
    """Return whether the frame of the caller is an argument of the frame's function. The interpreter calls
    signal handlers with (number, frame).
    """
    code, caller = frame.f_code, frame.f_back
    has_varargs = bool(code.co_flags & 0x04)  # inspect.CO_VARARGS
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_varargs]
    given = [frame.f_locals.get(name) for name in names]
    return caller is not None and any(
        value is caller or (type(value) is tuple and any(item is caller for item in value)) for value in given
    )


def _is_thrown(error: Exception, innermost: TracebackType) -> bool:
    """Return whether `error` looks as if another thread threw it into this thread: no instruction of the
    innermost frame raised it.

    A thrown exception has no arguments and appears between two instructions. Exceptions of C functions almost
    always have arguments.
    """
    from opcode import opname

    code, at = innermost.tb_frame.f_code.co_code, innermost.tb_lasti
    if not code or (at >= 0 and opname[code[at]] in ("RAISE_VARARGS", "RERAISE")):
        return False
    if isinstance(error, MemoryError | StopIteration | StopAsyncIteration):
        return False
    try:
        return type(error)().args == error.args
    except Exception:
        return False
