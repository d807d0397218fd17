"""The two parts of closing: on the recorded thread, and on the private loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from stepscope._recording.process import private_loop
from stepscope._recording.process.private_loop import Job
from stepscope.backends.threaded.undisturbed import undisturbed


def begin_closing(
    end_here: Callable[[], None], close: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[Job[None], BaseException | None]:
    """Call `end_here` on this thread, then begin `close` on the private loop.

    If `end_here` is interrupted, it is called once more. After a second interruption, the rest of it is
    skipped.

    Returns:
        The job of `close`, and the exception that first interrupted `end_here`, or None.
    """
    interruption: BaseException | None = None
    for attempt in (end_here, end_here, _nothing):
        try:
            undisturbed(attempt)
            return private_loop.submit(close()), interruption
        except BaseException as error:
            interruption = interruption or error
    raise interruption or RuntimeError("unreachable")


def close_and_wait(
    end_here: Callable[[], None], close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float | None
) -> None:
    """Close as `begin_closing` does, and wait until `close` has ended, or for `timeout_s`.

    Raises:
        BaseException: the first exception that interrupted the wait, or else the error of `close`.
    """
    job, interruption = begin_closing(end_here, close)
    interruption = private_loop.wait_on(job, timeout_s) or interruption
    if interruption is not None:
        raise interruption
    if job.done:
        job.result()


def _nothing() -> None: ...
