"""One profiler session per process: Kineto, CUPTI and the Ascend profiler are process-wide.

torch can tell whether the *calling thread* profiles, and a session of all threads it does not show even
there, so whoever starts a profiler says so here.
"""

from __future__ import annotations

import os

from stepscope.errors import ProfilerBusyError

_KEY = "this process"


class ProcessLock:
    """Held from the start of a profiler session to its end. Never waits, so a signal handler may use it."""

    def __init__(self) -> None:
        # `dict.setdefault` is atomic, and says who came first. A lock beside a name could be interrupted
        # between the two, and stay locked by nobody.
        self._held: dict[str, tuple[str, object]] = {}

    @property
    def holder(self) -> str | None:
        """Who records this process now, in words; None when nobody of ours does."""
        held = self._held.get(_KEY)
        return None if held is None else held[0]

    def acquire(self, holder: str, by: object = None) -> None:
        """Takes the process for `holder`, such as "the torch trace of step 2".

        Args:
            by: Who may `release` it. An interrupted caller releases it without knowing whether it got it.

        Raises:
            ProfilerBusyError: names who has it.
        """
        wanted = (holder, by)
        held = self._held.setdefault(_KEY, wanted)
        if held is not wanted:
            raise ProfilerBusyError(
                f"{holder} cannot start: {held[0]} is being recorded in "
                "this process, which holds one profiler session at a time. Fix: stop that one first"
            )

    def release(self, by: object = None) -> None:
        """Gives the process back, from any thread. Nothing happens if it is free, or another's than `by`."""
        held = self._held.get(_KEY)
        if held is not None and held[1] is by:
            self._held.pop(_KEY, None)

    def forget(self) -> None:
        """In the child of a fork: the session is the parent's, and so is the lock."""
        self._held.clear()


PROCESS_LOCK = ProcessLock()
"""The lock of this process. Every backend that owns a process-wide profiler acquires it in `start`."""

os.register_at_fork(after_in_child=PROCESS_LOCK.forget)
