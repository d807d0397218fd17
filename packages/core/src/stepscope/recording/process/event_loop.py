"""The event loop of this thread. asyncio is not imported to look for it."""

from __future__ import annotations

import sys


def in_event_loop() -> bool:
    """Return whether tasks may interleave on this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
