"""One window of torch.profiler, from start to the results that wait to be written.

`begin`, `advance` and `end` run on the window's thread (`window_thread`), one at a time, so nothing here
locks. Phases follow the schedule, off -> warmup -> active -> off and around again; without one, a window is
active from start to end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.threaded.mini_batches import Phase, cut_short, never_active, place
from stepscope.backends.threaded.threaded_window import Kept
from stepscope.backends.threaded.window_thread import WindowThread
from stepscope.backends.torch import foreign_sessions, libc
from stepscope.backends.torch.options import Options
from stepscope.config import ScheduleConfig
from stepscope.errors import BackendError, ProfilerBusyError

if TYPE_CHECKING:
    from torch.profiler.profiler import _KinetoProfile as Profile

current: TorchWindow | None = None
"""The window that holds this process. One writer: this module."""

kineto_has_started = False
"""Whether the seconds of the first start in this process are paid. One writer: this module."""
_OPERATORS_END_S = 0.1
"""From the stop of a session of all threads to the next start, and a tenth of it before the stop."""
_all_threads_stopped = 0.0
"""When the last such session did, on the monotonic clock. One writer: this module."""
_INTERRUPTED = "interrupted while it was being stopped"
_parents: list[object] = []
"""In the child of a fork: the parent's profile, kept because to destruct it would be to touch the session."""


@dataclass
class Recorded:
    """What one active phase recorded."""

    profile: Profile | None
    """None once it was written or discarded."""
    cycle: int
    truncated: str | None

    def drop(self) -> None:
        """Frees it. Destructing 200k events takes some 0.1 s."""
        self.profile = None
        libc.give_memory_back()


class TorchWindow:
    """`about` goes into the trace, as its key `stepscope`."""

    def __init__(
        self,
        name: str,
        thread: WindowThread,
        options: Options,
        *,
        schedule: ScheduleConfig | None,
        trace_id: str,
        about: Mapping[str, object],
    ) -> None:
        self.name = name
        self.thread = thread
        self.options = options
        self.phase: Phase = "off"
        self.over = False
        self.only_thread = None if thread.all_threads else threading.main_thread().ident
        """The one thread that is recorded; None: all are."""
        self._schedule = schedule
        self._trace_id = trace_id
        self._about = about
        self._profile: Profile | None = None
        self._mini_batch = 0
        self._cycle = 0
        self._unheeded: str | None = None
        self._kept: Kept[Recorded] = Kept()

    def records_here(self) -> bool:
        """Whether the calling thread is being recorded at this moment."""
        if self.phase != "active":
            return False
        return self.only_thread is None or self.only_thread == threading.get_ident()

    def take(self) -> list[Recorded]:
        """What is recorded and was not taken yet; see `Kept.take`. From any thread."""
        return self._kept.take(self.name)

    def begin(self) -> None:
        """Starts recording, or what the schedule has at mini-batch 0.

        Raises:
            ProfilerBusyError: somebody else's session, or a window of ours, has this process.
            BackendError: torch does not start. Nothing is left running.
        """
        global current
        try:
            if self.over:
                raise BackendError(f"{self.name} was stopped before it began")
            PROCESS_LOCK.acquire(self.name, by=self)
            current = self
            self._go_to(place(self._schedule, 0).phase)
        except BaseException as error:
            self.over = True
            self._give_back()
            if isinstance(error, Exception) and not isinstance(error, BackendError):
                raise BackendError(f"{self.name} did not start: {error}") from error
            raise

    def advance(self) -> None:
        """One mini-batch is done."""
        if self.over:
            return
        self._mini_batch += 1
        phase, cycle = place(self._schedule, self._mini_batch)
        try:
            if cycle != self._cycle:
                self._go_to("off")
                self._cycle = cycle
            self._go_to(phase)
        except Exception as error:
            self._kept.lost = f"after {self._mini_batch} mini-batches: {error}"
            self.end()

    def advance_unheeded(self) -> None:
        """One mini-batch is done, inside of a backward pass: the next call outside of it walks the schedule.
        From any thread.

        torch puts its sessions back as they were when the operator is over, and writes the end of those under
        way into memory of the session in which they began.
        """
        self._mini_batch += 1
        self._unheeded = (
            "advance() was called inside of a backward pass, where no session can be stopped. Fix: call it "
            "in the loop, after backward()"
        )

    def end(self, truncated: str | None = None) -> None:
        """Ends recording for good. What was recorded by now is kept. Interrupted by a Ctrl-C, a second call
        goes on from there.
        """
        try:
            if self.phase == "active":
                self._record(truncated or self._unheeded or self._cut_short())
            elif not self.over:
                self._kept.lost = self._kept.lost or truncated or self._unheeded or self._never_active()
                self._go_to("off")
        finally:
            self.over = self.phase == "off"
            if self.over:
                self._give_back()

    def _give_back(self) -> None:
        global current
        PROCESS_LOCK.release(by=self)
        if current is self:
            current = None

    def _go_to(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        if phase != "off":
            self._open(start=phase == "active")
        elif self.phase == "active":
            self._record(None)
        else:
            self._cancel_warmup()
        self.phase = phase

    def _open(self, *, start: bool) -> None:
        if self._profile is None:
            self._profile = self._prepare()
        if not start:
            return
        global kineto_has_started
        try:
            self._start(self._profile)
            kineto_has_started = True
            self._profile.add_metadata_json("stepscope", json.dumps({**self._about, "cycle": self._cycle}))
        except BaseException as error:
            self._abandon(interrupted=not isinstance(error, Exception))
            raise

    def _start(self, profile: Profile) -> None:
        if self.only_thread is None:
            time.sleep(max(0.0, _all_threads_stopped + _OPERATORS_END_S - time.monotonic()))
        with foreign_sessions.ours():
            profile.start_trace()

    def _stop(self, profile: Profile) -> str | None:
        return _stop_all_threads(profile) if self.only_thread is None else _stop(profile)

    def _prepare(self) -> Profile:
        others = foreign_sessions.busy()
        if others is not None:
            raise ProfilerBusyError(
                f"{self.name} cannot start: {others}; a second one would crash this process. "
                "Fix: end that session before the capture, or capture other steps"
            )
        profile = self.options.make_profile(f"{self._trace_id}_{self._cycle}")
        with foreign_sessions.ours():
            profile.prepare_trace()
        return profile

    def _record(self, truncated: str | None) -> None:
        """Stops the profile and keeps it. After a Ctrl-C it is still active, and a second call stops it."""
        profile = self._profile
        try:
            if profile is not None and foreign_sessions.running(self.only_thread is not None):
                self._kept.lost = _INTERRUPTED
                trouble = self._stop(profile)
                self._kept.recorded.append(
                    Recorded(profile, self._cycle, truncated or trouble or self._unheeded)
                )
                self._kept.lost = None
            elif self._kept.lost == _INTERRUPTED:
                foreign_sessions.clear_flag()  # torch had not come to it
            else:
                self._kept.lost = "its torch.profiler session was ended from outside stepscope"
        except Exception as error:
            self._kept.lost = f"torch.profiler did not stop: {error}"
        self.phase, self._profile = "off", None

    def _cancel_warmup(self) -> None:
        try:
            if self._profile is not None:
                self._start(self._profile)  # torch has no other way out of a warm-up
        finally:
            self._abandon()

    def _abandon(self, interrupted: bool = False) -> None:
        """Drops the profile, whether or not its start succeeded, or was interrupted by a Ctrl-C."""
        self.phase = "off"
        profile, self._profile = self._profile, None
        runs = interrupted and foreign_sessions.running(
            self.only_thread is not None
        )  # torch has not noted it
        if profile is not None and (runs or _started(profile)):
            self._stop(profile)
        else:
            foreign_sessions.clear_flag()

    def _cut_short(self) -> str | None:
        """Why the recording under way is not whole: its mini-batches are not all there."""
        if self._schedule is None:
            return None
        return cut_short(self._schedule, self._mini_batch, "torch.schedule")

    def _never_active(self) -> str | None:
        if self._schedule is None or self._kept.recorded:
            return None
        return never_active(self._schedule, self._mini_batch, "torch.schedule")


def forget() -> TorchWindow | None:
    """In the child of a fork, where the session is the parent's: the window of it, if there is one."""
    global current
    window, current = current, None
    if window is not None:
        _parents.append(window._profile)
        window._profile = None
        window.phase, window.over = "off", True
        window._kept.recorded.clear()
    return window


def _started(profile: Profile) -> bool:
    """Whether torch has enabled it: a start may also fail after that, and then it has to be stopped."""
    session = profile.profiler
    return session is not None and session.profiling_start_time_ns != 0


def _stop_all_threads(profile: Profile) -> str | None:
    """As `_stop`. Other threads are in the middle of operators, and one that begins while torch takes the
    session down, or ends in the next one, writes into freed memory (see `record_function_scopes`). So no more
    are recorded for a moment before, and no session begins for a moment after.
    """
    global _all_threads_stopped
    from torch.profiler import ProfilerActivity

    with suppress(Exception):  # of a torch without it, or that refuses: the session is stopped all the same
        profile.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
        time.sleep(_OPERATORS_END_S / 10)
    try:
        return _stop(profile)
    finally:
        _all_threads_stopped = time.monotonic()


def _stop(profile: Profile) -> str | None:
    """Stops it, also when the device no longer answers; then says so."""
    try:
        profile.stop_trace()
    except Exception as error:
        session = profile.profiler
        if session is None or session.kineto_results is not None:
            raise
        # torch synchronises the device before it stops, and a broken device raises there for ever. Left
        # running, the profiler would crash the process at exit.
        session.use_device = None
        profile.stop_trace()
        return f"the device did not synchronize: {error}"
    return None
