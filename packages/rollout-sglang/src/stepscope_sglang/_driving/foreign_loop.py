"""Event loops of callers that wait for us and run them for nothing else."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress

_MOMENT_S = 0.05
"""Time for which we run such a loop at once."""


def run_for_a_moment(loop: asyncio.AbstractEventLoop, answer: Future[object]) -> bool:
    """Run the loop for a moment, or until the answer is there. Return False if somebody else runs it.

    It is only a moment, because the loop is the caller's: as soon as the caller stops waiting, it needs it.
    """
    if loop.is_running():
        return False
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def end_soon(_: Future[object]) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(end)

    answer.add_done_callback(end_soon)
    try:
        loop.call_soon_threadsafe(loop.call_later, _MOMENT_S, end)
        loop.run_until_complete(over)
    except RuntimeError:  # somebody else began to run it, or closed it
        return False
    return True
