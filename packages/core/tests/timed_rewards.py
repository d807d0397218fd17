"""Rewards that time out by SIGALRM, below decorators of others. Nothing here knows of any profiler."""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_S = 0.003
LOST_S = 5
"""A timeout that has not arrived by then never does."""
reached: list[str] = []
"""The exceptions that timeouts have thrown here, in their order. One writer: `rewards`."""


class TimedOut(Exception):
    """Raised by the handler of SIGALRM."""


def _time_out(signum: int, frame: object) -> None:
    raise TimedOut


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _time_out)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def hiding(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return inner


@hiding
async def judge(text: str) -> float:
    """Return a score, after a turn of the event loop."""
    await asyncio.sleep(0)
    return float(text.count("1"))


def compare(text: str) -> float:
    """Return a score at once: a timeout hits a call of this as it begins or ends."""
    return float(len(text) % 3)


def rewards(completions: list[str], **_: object) -> list[float]:
    """Return a reward each. A comparison goes on until its timeout, which takes a point."""
    return [asyncio.run(judge(text)) - _timed_out(text) for text in completions]


def _timed_out(text: str) -> float:
    began = time.monotonic()
    try:
        with at_most(TIMEOUT_S):
            while time.monotonic() < began + LOST_S:
                compare(text)
        reached.append(f"nothing of {text!r}")
    except TimedOut as error:
        reached.append(f"{type(error).__name__} of {text!r}")
    return compare(text)
