"""Internal failures during a run: logged once per place, kept for the manifest, raised only in tests.

`STEPSCOPE_RAISE=1` raises them, `STEPSCOPE_RAISE=0` does not; unset, they are raised under pytest and nowhere
else.
"""

from __future__ import annotations

import os
import re
import threading
from types import ModuleType

from stepscope.errors import StepscopeError, ours

CANCELLED = "cancelled"
"""The outcome of a span whose work was cancelled. Other outcomes begin with the type of the error."""
_ENDS = (GeneratorExit, StopIteration, StopAsyncIteration)
"""Exceptions that end a generator or a loop normally."""
_CANCELS = frozenset({"CancelledError", "Cancelled", "TaskCancelledError"})
"""Names of the exceptions that cancel: of asyncio and concurrent.futures, of trio, of Ray."""

_lock = threading.RLock()  # a signal handler may note something in the middle of a note
_noted: dict[str, tuple[str, int]] = {}
"""{place: (first failure, number of failures)}. One writer: `note`."""
_warned: set[str] = set()
"""Reasons that were logged. One writer: `warn_once`."""


def warn(message: str, *values: object) -> None:
    """Log a warning for the user through the logger `stepscope`; `values` as in `logging`."""
    _logging().getLogger("stepscope").warning(message, *values)


def _logging() -> ModuleType:
    import logging  # import time: 10 ms, and most processes log nothing

    return logging


def warn_once(reason: str, about: str | None = None) -> None:
    """Log a warning for the user, unless this process has logged the same text before.

    Args:
        about: Setting that the warning is about. Of several warnings about it, only the first is logged.
    """
    is_known = reason in _warned or about in _warned
    _warned.update(text for text in (reason, about) if text is not None)
    if not is_known:
        warn("stepscope: %s", reason)


def has_warned(reason: str | None) -> bool:
    """Return whether `warn_once` has been given this text."""
    return reason in _warned


def tell(message: str, *values: object) -> None:
    """Log a message for the user at INFO.

    The message is visible even if no logging level is configured, when Python would show only warnings.
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
    """Record that stepscope's own code failed at `where` (a noun phrase). Never raises outside tests.

    Args:
        aloud: True to log a warning; False to log at DEBUG, because another process logs the warning.
    """
    with _lock:
        first, count = _noted.get(where, (f"{type(error).__name__}: {error}", 0))
        _noted[where] = (first, count + 1)
    if count == 0:
        cause = "" if isinstance(error, StepscopeError | OSError) else " after an internal error"
        log = warn if aloud else _logging().getLogger("stepscope").debug
        log("stepscope: disabled %s%s; training continues: %s", where, cause, first)
    if _raises():
        raise error


_CAUGHT = re.compile(r"\s*(Caught \w+ in |-- Process \d+ terminated)")
"""Begin of the messages with which torch raises the error of a data loader's or spawned worker."""
_RAISED = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
"""A traceback in a message, to the line of its error."""
_PID = re.compile(r"\bpid: \d+")
"""The process of a dead actor, in a later line of Ray's message."""


def describe(error: BaseException) -> str:
    """Return `ExceptionType: message`, or the type alone if the message is empty or its `__str__` fails.

    The text is the first line of the message and has at most 200 characters. An error of stepscope's own,
    which ends with the fix, may have more lines, and 2000 characters. If a Ray task, a
    torch worker or a group of tasks only carries the user's error, the text describes the user's error.
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
    if _CAUGHT.match(message):
        remote = _RAISED.findall(message)
        if remote:
            return _shortened(remote[-1].strip(), 200)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    died = _PID.search(message) if name == "ActorDiedError" else None
    return _shortened(f"{name}: {first}" if first else name, 200) + (f" ({died[0]})" if died else "")


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that `error` carries, the first one of several; None if it carries none."""
    name = type(error).__name__
    if name.startswith("RayTaskError"):
        inner = getattr(error, "cause", None)
    elif name in ("ExceptionGroup", "BaseExceptionGroup"):
        inner = next(iter(getattr(error, "exceptions", ())), None)
    else:
        return None
    return inner if isinstance(inner, BaseException) and inner is not error else None


def _shortened(text: str, most: int) -> str:
    """Return the text, cut between words if it has more than `most` characters."""
    if len(text) <= most:
        return text
    kept = text[: most - 3]
    whole, _, rest = kept.rpartition(" ")
    return f"{whole if len(rest) < most // 4 else kept}..."


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome that a span records for the exception that left it: None for a normal end,
    `CANCELLED` for a cancellation, else the text of `describe`.
    """
    if isinstance(error, _ENDS):
        return None
    if any(kind.__name__ in _CANCELS for kind in type(error).__mro__):
        return CANCELLED
    return describe(error)


def take() -> dict[str, str]:
    """Return the failures since the last call as {place: `first failure (times)`}."""
    with _lock:
        taken = {where: f"{first} ({count} times)" for where, (first, count) in _noted.items()}
        _noted.clear()
    return taken


def renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


def _raises() -> bool:
    wanted = os.environ.get("STEPSCOPE_RAISE")
    return wanted == "1" or (wanted is None and "PYTEST_CURRENT_TEST" in os.environ)
