"""A lock for profiler sessions: Kineto, CUPTI and the Ascend profiler allow one session per process.

torch reports only a session of the *calling thread*, and no session that records all threads. Therefore each
backend takes this lock before it starts a profiler.
"""

from __future__ import annotations

import os

from stepscope.errors import ProfilerBusyError

_KEY = "this process"


class ProcessLock:
    """Lock that is held during a profiler session. No method waits, so signal handlers may use the lock."""

    def __init__(self) -> None:
        # `dict.setdefault` is atomic and returns the first holder. With a `threading.Lock` and a separate
        # name of the holder, an interrupt could leave a locked lock without a name.
        self._held: dict[str, tuple[str, object]] = {}

    @property
    def holder(self) -> str | None:
        """Description of the session that records this process now, or None if no backend holds the lock."""
        held = self._held.get(_KEY)
        return None if held is None else held[0]

    def acquire(self, holder: str, by: object = None) -> None:
        """Lock the process for `holder`, such as "the torch trace of step 2".

        Args:
            by: The object that may `release` the lock. An interrupted caller may call `release` even if it
                did not get the lock.

        Raises:
            ProfilerBusyError: another session holds the lock. The message names the session.
        """
        wanted = (holder, by)
        held = self._held.setdefault(_KEY, wanted)
        if held is not wanted:
            raise ProfilerBusyError(
                f"{holder} cannot start: {held[0]} is being recorded in "
                "this process, which holds one profiler session at a time. Fix: stop that one first"
            )

    def release(self, by: object = None) -> None:
        """Release the lock, from any thread. Do nothing if `by` does not hold it."""
        held = self._held.get(_KEY)
        if held is not None and held[1] is by:
            self._held.pop(_KEY, None)

    def forget(self) -> None:
        """Free the lock in a forked child, because the session belongs to the parent."""
        self._held.clear()


PROCESS_LOCK = ProcessLock()
"""The lock of this process. Every backend with a process-wide profiler acquires it in `start`."""

os.register_at_fork(after_in_child=PROCESS_LOCK.forget)
