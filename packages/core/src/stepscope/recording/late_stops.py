"""Stops of engines that took longer than their deadline: they go on, on their caller's event loop, and what
they bring is entered, until the next capture begins or that loop ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stepscope.files.sidecar import Artifact

_GRACE_S = 1.0
"""For a stop to end that is told to."""

_late: set[asyncio.Future[list[Artifact]]] = set()
"""Writers: `add`, and each as it ends."""


def add(
    stopping: asyncio.Future[list[Artifact]], came: Callable[[asyncio.Future[list[Artifact]]], None]
) -> None:
    """Calls `came` once it has ended, unless it was given up."""
    _late.add(stopping)

    def ended(stopped: asyncio.Future[list[Artifact]]) -> None:
        _late.discard(stopped)
        if not stopped.cancelled():
            came(stopped)

    stopping.add_done_callback(ended)


async def give_up() -> None:
    """The next capture begins: an engine is not told to stop and to start at once. What an adapter brings to
    its end by itself still comes to its folder.
    """
    here = asyncio.get_running_loop()
    mine = {each for each in _late if each.get_loop() is here}
    for each in tuple(_late):
        if each in mine:
            each.cancel()
        elif each.get_loop().is_closed():
            _late.discard(each)  # its loop was closed under it: it will never end
        else:
            each.get_loop().call_soon_threadsafe(each.cancel)
    if mine:
        await asyncio.wait(mine, timeout=_GRACE_S)
