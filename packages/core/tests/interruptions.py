"""Interruptions of functions of stepscope, at any instruction."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import pytest

import stepscope

OURS = os.path.dirname(stepscope.__file__)
LEFTOVERS = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # one that no variable got yet
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),  # one that just began
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # in a generator's own end
    pytest.mark.usefixtures("leftovers_are_collected"),
]
"""Marks of tests in which a signal between two instructions leaves objects to the collector, which warns."""


class Signal:
    """Comes once, at the moment of that number in files that count.

    `where` it came is None if there were not so many moments.
    """

    def __init__(self, number: int, handler: Callable[[], object], counts: Callable[[str], bool]) -> None:
        self.where: str | None = None
        self._left = number
        self._handler = handler
        self._counts = counts

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "c_return") or not self._counts(file):
            return
        # `with lock:` takes no signal between the two, but for a bug of CPython 3.14 (gh-148874).
        if getattr(called, "__name__", "") == "__enter__":
            return
        self._left -= 1
        if self._left < 0:
            sys.setprofile(None)
            self.where = f"{file}:{frame.f_lineno} {event}"
            self._handler()
