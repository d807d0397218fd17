"""Calls of libraries that may block, with a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from stepscope.errors import ours

T = TypeVar("T")


def in_time(name: str, ask: Callable[[], T], seconds: float) -> T | None:
    """Call `ask` on a separate thread and return its result, or None if it fails or takes longer than
    `seconds`.

    Args:
        name: A noun phrase for the log. A library without an answer is logged and is no failure.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except ours() as error:
            logging.getLogger("stepscope").debug("stepscope: %s: %s", name, error)

    try:
        thread = threading.Thread(target=run, name="stepscope-why", daemon=True)
        thread.start()
    except ours(RuntimeError):  # no thread can be started
        return None
    thread.join(seconds)
    return answers[0] if answers else None
