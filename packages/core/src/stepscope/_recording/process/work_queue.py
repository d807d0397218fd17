"""A queue of jobs, which one daemon thread does in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from stepscope.errors import ours

J = TypeVar("J")


class _Entry(Generic[J]):
    __slots__ = ("deferred", "job")

    def __init__(self, job: J, deferred: bool) -> None:
        self.job = job
        self.deferred = deferred


class WorkQueue(Generic[J]):
    """A queue of jobs. Its thread starts with the first job, or earlier with `start`."""

    def __init__(self, name: str, work: Callable[[J], None], *, inline: bool = False) -> None:
        """
        Args:
            name: Name of the thread.
            work: Does one job. An exception ends the thread; the next job starts a new thread.
            inline: True if `drain` itself does the jobs when no thread can start.
        """
        self._name = name
        self._work = work
        self._inline = inline
        self._entries: deque[_Entry[J]] = deque()
        self._running: _Entry[J] | None = None
        self._thread: threading.Thread | None = None
        self._is_ended = False
        # A Condition has an RLock by default, as needed: a SIGTERM handler may call drain() during put().
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread. At interpreter exit, when Python 3.12 cannot start threads, do nothing."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except ours(RuntimeError):
            return
        self._thread = thread

    def put(self, job: J, *, deferred: bool = False) -> None:
        """Queue a job.

        Args:
            deferred: True if the job waits for `drain`. Later jobs may be done first.
        """
        with self._changed:
            self._entries.append(_Entry(job, deferred))
            self.start()  # also for a deferred job, because at exit no thread can start
            self._changed.notify_all()

    def end(self) -> None:
        """End the thread once all jobs are done. A later job starts a new thread, which ends after the
        job.
        """
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> list[J]:
        """Begin deferred jobs, and wait until all jobs are done.

        Returns:
            The jobs that are not done after `timeout_s`, the running job first. They continue.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            for entry in self._entries:
                entry.deferred = False
            self._changed.notify_all()
            while self._unfinished() and time.monotonic() < until:
                if self._thread is not None:
                    self._changed.wait(until - time.monotonic())
                elif not (self._inline and self._do_next()):
                    break
            return self._unfinished()

    def unfinished(self) -> list[J]:
        """Return the jobs that are not done, the running job first."""
        with self._changed:
            return self._unfinished()

    def _unfinished(self) -> list[J]:
        running = () if self._running is None else (self._running,)
        return [entry.job for entry in (*running, *self._entries)]

    def _run(self) -> None:
        try:
            while self._await_job():
                self._do_next()
        except BaseException:
            self._thread = None
            raise

    def _await_job(self) -> bool:
        """Wait for a job that is not deferred. Return False if no job is left and the thread should end."""
        with self._changed:
            self._changed.wait_for(self._has_due)
            if not self._entries:
                self._thread = None
                return False
            return True

    def _has_due(self) -> bool:
        if not self._entries:
            return self._is_ended
        return any(not entry.deferred for entry in self._entries)

    def _do_next(self) -> bool:
        """Do the first job that is not deferred. Return whether there was one."""
        with self._changed:
            entry = next((entry for entry in self._entries if not entry.deferred), None)
            if entry is None:
                return False
            self._entries.remove(entry)
            self._running = entry
        try:
            self._work(entry.job)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
        return True
