"""The event loop of this thread. asyncio is not imported to look for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


def in_event_loop() -> bool:
    """Return whether tasks may interleave on this thread."""
    return running_loop() is not None


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs on this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    return None if asyncio is None else asyncio._get_running_loop()
