"""Stops of engines that took longer than their deadline.

They go on, on the private loop, until the next capture begins. Their files are entered. One of the next three
captures of this process enters files that an adapter completes after that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from stepscope._recording.process import failures, fork
from stepscope.engines.own_thread import own_thread
from stepscope.errors import ours
from stepscope.files.sidecar import Artifact

_GRACE_S = 1.0
"""Longest wait for a stop that was told to end."""

_late: set[asyncio.Future[list[Artifact]]] = set()
"""Writers: `add`, each stop at its end, and a forked child."""

_LOOKS = 3
"""Number of looks for the files of a stop that was given up, once for each later capture: each look reads the
folder of a step.
"""
_given_up: deque[tuple[Callable[[], bool], int]] = deque()
"""Functions that enter files of given-up stops, with the looks that are left. Writers: `add`, `expect`,
`enter_what_came`, and a forked child.
"""


def add(
    stopping: asyncio.Future[list[Artifact]],
    came: Callable[[asyncio.Future[list[Artifact]]], None],
    came_by_itself: Callable[[], bool] | None = None,
) -> None:
    """Call `came` once the stop has ended. If it is given up, `enter_what_came` calls `came_by_itself` until
    that reports a file.
    """
    _late.add(stopping)

    def ended(stopped: asyncio.Future[list[Artifact]]) -> None:
        _late.discard(stopped)
        if not stopped.cancelled():
            came(stopped)
        elif came_by_itself is not None:
            _given_up.append((came_by_itself, _LOOKS))

    stopping.add_done_callback(ended)


def expect(came_by_itself: Callable[[], bool]) -> None:
    """Have `enter_what_came` call this until it returns True: files may still come after a stop."""
    _given_up.append((came_by_itself, _LOOKS))


async def give_up() -> None:
    """Give up stops that still run, before a capture starts its engines. Files that an adapter completes by
    itself still come to its folder, and `enter_what_came` enters them.
    """
    stops = tuple(_late)
    for stop in stops:
        stop.cancel()
    if stops:
        await asyncio.wait(stops, timeout=_GRACE_S)


async def enter_what_came() -> None:
    """Look for files of stops that were given up. Cheap where there are none."""
    for _ in range(len(_given_up)):
        came_by_itself, looks = _given_up.popleft()
        try:
            if not await own_thread(came_by_itself) and looks > 1:
                _given_up.append((came_by_itself, looks - 1))
        except ours() as error:
            failures.note("entering files that came late", error)


def _forget() -> None:
    _late.clear()
    _given_up.clear()  # its parent's captures are its parent's to write


fork.forgets("late files", _forget)
