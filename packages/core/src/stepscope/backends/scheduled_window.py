"""A profiler window that a `ScheduleConfig` switches on and off.

Each cycle of the schedule goes through the phases off, warmup and active. Without a schedule, a window is
active from start to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.window_thread import WindowThread
from stepscope.config import ScheduleConfig
from stepscope.errors import BackendError, is_users, ours

Phase: TypeAlias = Literal["off", "warmup", "active"]


class Place(NamedTuple):
    """The phase of one mini-batch, and the number of its cycle (0, 1, 2...)."""

    phase: Phase
    cycle: int


def place(schedule: ScheduleConfig | None, mini_batch: int) -> Place:
    """Return the phase and cycle of mini-batch 0, 1, 2... of a window. Without a schedule, all mini-batches
    are active.
    """
    if schedule is None:
        return Place("active", 0)
    at = mini_batch - schedule.skip_first
    length = schedule.wait + schedule.warmup + schedule.active
    cycle, at = divmod(at, length)
    if cycle < 0 or (schedule.repeat and cycle >= schedule.repeat) or at < schedule.wait:
        return Place("off", max(cycle, 0))
    return Place("warmup" if at < schedule.wait + schedule.warmup else "active", cycle)


def first_active(schedule: ScheduleConfig) -> int:
    """Return the number of the first mini-batch that is recorded."""
    return schedule.skip_first + schedule.wait + schedule.warmup


def cut_short(schedule: ScheduleConfig, mini_batch: int, at: str) -> str:
    """Return the reason why a recording that ends at `mini_batch` is incomplete.

    Args:
        at: The schedule's dotted name in the configuration.
    """
    length = schedule.wait + schedule.warmup + schedule.active
    done = (mini_batch - first_active(schedule)) % length
    return f"{at}: the window ended after {done} of {schedule.active} active mini-batches"


def never_active(schedule: ScheduleConfig, mini_batch: int, at: str) -> str:
    """Return the reason why a window that ends at `mini_batch` has recorded nothing, with the fix."""
    return (
        f"{at} records from mini-batch {first_active(schedule)} on (skip_first + wait + warmup), but "
        f"stepscope.advance() was called {mini_batch} times. Fix: a shorter schedule, or call advance() "
        "after each mini-batch"
    )


class Cut(Protocol):
    """A recording of one window, which may have ended early."""

    truncated: str | None


CutT = TypeVar("CutT", bound=Cut)


class ScheduledWindow(ABC, Generic[CutT]):
    """One window. `begin`, `advance` and `end` run on the window's thread, one at a time, so no lock is
    needed.
    """

    current: ClassVar[Any] = None
    """The window of this class that is open in this process, or None. Writers: `begin`, `_give_back`, a
    forked child."""

    def __init__(
        self,
        name: str,
        thread: WindowThread,
        *,
        schedule: ScheduleConfig | None,
        key: str,
        about: Mapping[str, object],
    ) -> None:
        """
        Args:
            key: The schedule's dotted name in the configuration, for messages.
            about: Metadata of the window's recordings.
        """
        self.name = name
        self.thread = thread
        self.phase: Phase = "off"
        self.over = False
        self._schedule = schedule
        self._key = key
        self._about = about
        self._mini_batch = 0
        self._cycle = 0
        self._recorded: deque[CutT] = deque()
        """Recordings that `take` has not returned yet."""
        self._lost: str | None = None
        """The reason why there is no recording, or why the last recording is incomplete; else None."""

    def take(self) -> list[CutT]:
        """Remove and return all recordings. May be called from any thread.

        Raises:
            BackendError: there is no recording. The message has the reason.
        """
        recordings = []
        while self._recorded:
            recordings.append(self._recorded.popleft())
        lost, self._lost = self._lost, None
        if lost is not None and not recordings:
            raise BackendError(f"{self.name} is lost: {lost}")
        if lost is not None:
            recordings[-1].truncated = recordings[-1].truncated or lost
        return recordings

    def begin(self) -> None:
        """Enter the phase of mini-batch 0, which is active if there is no schedule.

        Raises:
            ProfilerBusyError: another window, or a profiler of other code, records this process.
            BackendError: the profiler did not start. Nothing is left running.
        """
        try:
            if self.over:
                raise BackendError(f"{self.name} was stopped before it began")
            PROCESS_LOCK.acquire(self.name, by=self)
            type(self).current = self
            self._go_to(place(self._schedule, 0))
        except BaseException as error:
            self.over = True
            self._give_back()
            if not is_users(error) and not isinstance(error, BackendError):
                raise BackendError(f"{self.name} did not start: {error}") from error
            raise

    def advance(self) -> None:
        """Go to the phase of the next mini-batch."""
        if self.over:
            return
        self._mini_batch += 1
        try:
            self._go_to(place(self._schedule, self._mini_batch))
        except ours() as error:
            self._lost = f"after {self._mini_batch} mini-batches: {error}"
            self.end()

    @abstractmethod
    def end(self, truncated: str | None = None) -> None:
        """End the window and keep the recording so far. `truncated` is the reason for an early end."""

    @abstractmethod
    def _go_to(self, to: Place) -> None:
        """Enter the phase of a mini-batch."""

    def _give_back(self) -> None:
        PROCESS_LOCK.release(by=self)
        if type(self).current is self:
            type(self).current = None

    def _cut_short(self) -> str | None:
        """Return the reason why the open recording is incomplete. Return None if there is no schedule, or no
        recording is open.
        """
        if self._schedule is None or self.phase != "active":
            return None
        return cut_short(self._schedule, self._mini_batch, self._key)

    def _never_active(self) -> str | None:
        if self._schedule is None or self._recorded:
            return None
        return never_active(self._schedule, self._mini_batch, self._key)
