"""One profiler session per process: Kineto, CUPTI and the Ascend profiler are process-wide.

torch can tell whether the *calling thread* profiles, and a session of all threads it does not show even
there, so whoever starts a profiler says so here.
"""

from __future__ import annotations

import os
import threading

from stepscope.errors import ProfilerBusyError


class ProcessLock:
    """Held from the start of a profiler session to its end. Never waits, so a signal handler may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: str | None = None

    @property
    def holder(self) -> str | None:
        """Who records this process now, in words; None when nobody of ours does."""
        return self._holder

    def acquire(self, holder: str) -> None:
        """Takes the process for `holder`, such as "the torch trace of step 2".

        Raises:
            ProfilerBusyError: names who has it.
        """
        if not self._lock.acquire(blocking=False):
            raise ProfilerBusyError(
                f"{holder} cannot start: {self._holder or 'another profiler session'} is being recorded in "
                "this process, which holds one profiler session at a time. Fix: stop that one first"
            )
        self._holder = holder

    def release(self) -> None:
        """Gives the process back, from any thread. The caller must hold it; a second time nothing happens."""
        held, self._holder = self._holder, None
        if held is not None:
            self._lock.release()

    def forget(self) -> None:
        """In the child of a fork: the session is the parent's, and so is the lock."""
        self.__init__()  # type: ignore[misc]  # a fresh lock: the old one may be in any state


PROCESS_LOCK = ProcessLock()
"""The lock of this process. Every backend that owns a process-wide profiler acquires it in `start`."""

os.register_at_fork(after_in_child=PROCESS_LOCK.forget)
