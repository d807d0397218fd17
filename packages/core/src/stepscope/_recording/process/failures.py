"""Internal errors during a run: logged once for each place, and raised only in tests.

With `STEPSCOPE_RAISE=1` they are raised, with `STEPSCOPE_RAISE=0` they are not. By default they are raised
only under pytest.
"""

from __future__ import annotations

import os
import re
import threading
from types import ModuleType
from typing import Any

from stepscope.errors import StepscopeError, ours

CANCELLED = "cancelled"
"""Outcome of a span whose work was cancelled. Other outcomes begin with the type of an error."""
_ENDS = (GeneratorExit, StopIteration, StopAsyncIteration)
"""Exceptions that end a generator or a loop normally."""
_CANCELS = frozenset({"CancelledError", "Cancelled", "TaskCancelledError"})
"""Names of cancellation exceptions: of asyncio and concurrent.futures, of trio, and of Ray."""

_lock = threading.RLock()  # reentrant, because a signal handler may call note() during note()
_noted: set[str] = set()
"""Places whose first error was logged. One writer: `note`."""
_warned: set[str] = set()
"""Texts that `warn_once` has logged. One writer: `warn_once`."""


def warn(message: str, *values: object) -> None:
    """Log a warning with the logger `stepscope`. `values` are arguments of `message`, as in `logging`."""
    _logging().getLogger("stepscope").warning(message, *values)


def _logging() -> ModuleType:
    import logging  # imported here: 10 ms, and most processes log nothing

    return logging


def warn_once(reason: str, about: str | None = None) -> None:
    """Log a warning, unless this process has logged the same text before.

    Args:
        about: Setting that the warning concerns. Only the first warning about a setting is logged.
    """
    is_known = reason in _warned or about in _warned
    _warned.update(text for text in (reason, about) if text is not None)
    if not is_known:
        warn("stepscope: %s", reason)


def has_warned(reason: str | None) -> bool:
    """Return whether `warn_once` was called with this text."""
    return reason in _warned


def tell(message: str, *values: object) -> None:
    """Log a message at level INFO.

    The message is shown even if logging is not configured. Python alone would then show only warnings.
    """
    logging = _logging()
    logger = logging.getLogger("stepscope")
    by_default = logger.level == logging.NOTSET and logger.getEffectiveLevel() == logging.WARNING
    if not by_default or logger.manager.disable >= logging.INFO:
        logger.info(message, *values)
        return
    record = logger.makeRecord(logger.name, logging.INFO, "stepscope", 0, message, values, None)
    if logger.hasHandlers():
        logger.handle(record)
    elif logging.lastResort is not None:
        logging.lastResort.handle(record)


def note(where: str, error: BaseException, *, aloud: bool = True) -> None:
    """Record an error of stepscope's own code. `where` is a noun phrase for what failed. Never raises outside
    of tests.

    Args:
        aloud: True to log a warning; False to log at level DEBUG, because another process logs the warning.
    """
    with _lock:
        is_first = where not in _noted
        _noted.add(where)
    if is_first:
        cause = "" if isinstance(error, StepscopeError | OSError) else " after an internal error"
        log = warn if aloud else _logging().getLogger("stepscope").debug
        text = f"{type(error).__name__}: {error}"
        log("stepscope: disabled %s%s; training continues: %s", where, cause, text)
    if _raises():
        raise error


_CAUGHT = re.compile(r"\s*(Caught \w+ in |-- Process \d+ terminated)")
"""Matches torch's message for an error in a worker of a data loader or in a spawned process."""
_RAISED = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
"""Matches a traceback in a message; the group is the line with the error."""
_PID = re.compile(r"\bpid: \d+")
"""Matches the process id in Ray's message about a dead actor."""


def describe(error: BaseException) -> str:
    """Return `ExceptionType: message`, or only the type if the message is empty or `__str__` raises.

    The message is cut to its first line and 200 characters. An error of stepscope, which ends with the fix,
    may have several lines and 2000 characters. If `error` only wraps a user's error (of a Ray task, a torch
    worker, torchrun, a retry or a group of tasks), the text describes the user's error.
    """
    try:
        inner = _inner(error)
        if inner is not None:
            return describe(inner)
        message = str(error)
    except ours():
        return type(error).__name__
    name = type(error).__name__
    if isinstance(error, StepscopeError):
        return _shortened(f"{name}: {message}", 2000)
    if name == "ChildFailedError" and hasattr(error, "get_first_failure"):
        return _shortened(_of_child(*error.get_first_failure()), 200)
    if _CAUGHT.match(message):
        remote = _RAISED.findall(message)
        if remote:
            return _shortened(remote[-1].strip(), 200)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    died = _PID.search(message) if name == "ActorDiedError" else None
    return _shortened(f"{name}: {first}" if first else name, 200) + (f" ({died[0]})" if died else "")


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that `error` wraps (the first if there are several), or None."""
    name = type(error).__name__
    if name.startswith("RayTaskError"):
        inner = getattr(error, "cause", None)
    elif name in ("ExceptionGroup", "BaseExceptionGroup"):
        inner = next(iter(getattr(error, "exceptions", ())), None)
    elif name == "RetryError":
        attempt: Any = getattr(error, "last_attempt", None)
        inner = attempt.exception() if getattr(attempt, "failed", False) else None
    else:
        return None
    return inner if isinstance(inner, BaseException) and inner is not error else None


def _of_child(rank: int, failure: Any) -> str:
    """Return the error of the process that failed first under torchrun, or how that process ended.

    Args:
        failure: torch's `ProcessFailure`. Its message is a mapping if the process recorded its error.
    """
    message, said = failure.message, f"ended with exit code {failure.exitcode}"
    if isinstance(message, dict):
        said = message.get("message", said)
    elif failure.exitcode < 0:
        said = f"was ended by {failure.signal_name()}"
    return f"{said} (rank {rank}, pid {failure.pid})"


def _shortened(text: str, most: int) -> str:
    """Return the text, cut between words if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    kept = text[: most - 3]
    whole, _, rest = kept.rpartition(" ")
    return f"{whole if len(rest) < most // 4 else kept}..."


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome of a span that an exception left: None for a normal end, `CANCELLED` for a
    cancellation, else the text of `describe`.
    """
    if isinstance(error, _ENDS):
        return None
    if any(kind.__name__ in _CANCELS for kind in type(error).__mro__):
        return CANCELLED
    return describe(error)


def renew_lock() -> None:
    """Replace the lock in a forked child, because another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


def _raises() -> bool:
    wanted = os.environ.get("STEPSCOPE_RAISE")
    return wanted == "1" or (wanted is None and "PYTEST_CURRENT_TEST" in os.environ)
