"""Actors of an importable module whose methods refer to what cannot be pickled, for the tests on Ray."""

from __future__ import annotations

import threading

from stepscope import profile_step

LOCK = threading.Lock()


class LockedActor:
    @profile_step(role="actor", attrs=lambda self, n: {"locked": LOCK.locked()})
    def locked_update(self, n: int) -> int:
        with LOCK:
            return n + 1


class LockedAsyncActor:
    @profile_step(role="rollout")
    async def locked_generate(self, n: int) -> int:
        with LOCK:
            return n + 1
