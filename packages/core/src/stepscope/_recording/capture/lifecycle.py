"""Lifecycle of one capture: new -> opening -> open -> closing -> closed.

`CaptureWork` opens and closes on the private loop while the caller waits. The caller's thread itself starts
and stops the profiler (unless the profiler has its own thread), and switches recording on and off. If an
exception (a Ctrl-C, an alarm) interrupts an opening, the opening is undone before the exception is raised. If
it interrupts a closing, the closing is completed first.

A closing has three parts:

1. On the caller's thread, `Session.leave` reads the clock at the step's end. `Lifecycle._end` then asks
   workers and engines to stop (`CaptureWork.begin_stopping`), and stops recording and the profiler of this
   process (`Session.end`).
2. On the private loop, while the caller waits, `CaptureWork._close` writes the spans and counters and awaits
   workers and engines. `_close` also completes the manifest (`conclusion.conclude`) and frees the process for
   the next capture.
3. Later, on the exporter's thread (`exports.Exporter`), traces and sidecars are written, and then
   `manifest.json` (`pipeline.fold_when_written`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from stepscope._recording.capture import conclusion, configure
from stepscope._recording.capture.asked import Asked, Closing
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.capture.work import CaptureWork
from stepscope._recording.fanout.participants import Participants
from stepscope._recording.instrument import no_step
from stepscope._recording.process import failures, private_loop
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import running_loop
from stepscope._recording.session import activation
from stepscope._recording.session.activation import Claim, Taker
from stepscope._recording.session.session import Session
from stepscope.backends.undisturbed import postponed, undisturbed
from stepscope.engines.own_thread import opened_on, own_thread
from stepscope.errors import CaptureError, CaptureOpenError, is_users
from stepscope.files.manifest import Ending

T = TypeVar("T")


class Lifecycle:
    """The opening and closing of one capture, on the caller's side."""

    def __init__(self, asked: Asked, taker: Taker) -> None:
        """
        Args:
            taker: The object that holds the claim on the process.
        """
        self._asked = asked
        self._taker = taker
        self._work: CaptureWork | None = None
        """The work of the capture, or None before the opening."""
        self._closing_on: asyncio.AbstractEventLoop | None = None
        """Event loop of the task that is closing the capture, or None."""

    @property
    def state(self) -> str:
        return "new" if self._work is None else self._work.state

    @property
    def session(self) -> Session | None:
        return None if self._work is None else self._work.session

    @property
    def result(self) -> CaptureResult | None:
        return None if self._work is None else self._work.result

    def open(self, began_ns: int) -> None:
        """Open the capture. Call this on the thread to record."""
        work = self._take_process(began_ns)
        if work is None:
            return
        try:
            session = _result(work.begin())
            if session is None:
                return
            # On this thread, because torch logs an error on another thread.
            undisturbed(session.prepare_profiler)
            _result(work.open(session))
            undisturbed(partial(self._begin, work, session))
        except BaseException as error:
            closing = self._undo(work, error)
            self.close(closing)
            self._fail(error, closing.discard)

    async def aopen(self, began_ns: int) -> None:
        """Open the capture without blocking the event loop. A cancellation is raised after the opening is
        undone.
        """
        work = self._take_process(began_ns)
        if work is None:
            return
        try:
            session = await _aresult(work.begin())
            if session is None:
                return
            await own_thread(session.prepare_profiler)  # a separate thread, as this may take seconds
            await _aresult(work.open(session))
            undisturbed(partial(self._begin, work, session))
        except BaseException as error:
            closing = self._undo(work, error)
            cancelled = await self.aclose(closing)
            self._fail(error, closing.discard)
            if cancelled is not None:
                raise cancelled from None

    def _take_process(self, began_ns: int) -> CaptureWork | None:
        """Claim this process for this capture, without writing or starting anything.

        Returns:
            The work of the capture, or None if a logged error prevented the capture.

        Raises:
            CaptureError: another capture has claimed the process, or this capture was opened before.
        """
        asked = self._asked
        if self.state != "new":
            raise CaptureError(
                f"this capture of step {asked.step} is {self.state}; make a new one with capture()"
            )
        claim = Claim(asked.step, self._taker)
        try:
            other = claim.take()
            if other is not None:
                raise CaptureOpenError(_refusal(asked.step, other))
            participants = None
            if asked.workers is not None or asked.engines is not None:
                participants = Participants(asked.workers, asked.engines, checked=True)
            configure.check(asked.config, on_ray=participants is not None and participants.fleet is not None)
            if asked.config.instrument:
                configure.instrument(asked.config)
            self._work = CaptureWork(asked, participants, claim, began_ns)
        except BaseException as error:
            claim.free()
            if isinstance(error, CaptureOpenError):
                raise
            self._fail(error, f"opening failed: {describe(error)}")
            return None
        return self._work

    def _begin(self, work: CaptureWork, session: Session) -> None:
        """Do the last part of the opening, on the thread to record: start the profiler and the recording."""
        if work.state != "opening":
            return  # a signal handler or another thread has closed the capture
        session.start_profiler()
        activation.activate(session)
        if work.state == "opening":
            work.state = "open"
            if session.config.instrument:
                no_step.captured(session.config)

    @staticmethod
    def _undo(work: CaptureWork, error: BaseException) -> Closing:
        """Return the arguments for closing a capture after an error in its opening."""
        if work.state in ("closing", "closed") and not is_users(error):
            return Closing()  # other code has closed the capture, which caused the error
        reason = f"opening failed: {describe(error)}"
        return Closing(Ending("rollback", reason), discard=reason)

    def _fail(self, error: BaseException, reason: str | None) -> None:
        """Record or raise an error of the opening.

        Args:
            reason: Reason for the manifest, or None if other code closed the capture, which is not an error.
        """
        if reason is None:
            return
        conclusion.tell_asker(self._asked, reason)
        if self._asked.config.instrument:
            no_step.failed(error, self._asked.config)
        if _is_for_the_user(error, self._asked):
            raise error
        failures.note("opening a capture", error)

    def leave(self) -> None:
        """Read the clock at the end of the step. Call this before any other part of the closing."""
        if self.session is not None and self.state in ("opening", "open"):
            self.session.leave()

    def is_left_to_a_task(self) -> bool:
        """Return whether a task of this thread's event loop is closing the capture. A wait on this thread
        would block the task.
        """
        return self._closing_on is not None and self._closing_on is running_loop()

    def close(self, closing: Closing, timeout_s: float | None = None) -> None:
        """Close the capture, and wait up to `timeout_s` until it is closed.

        A signal handler may call this during a start or stop of the profiler. The call then returns at once,
        and the capture is closed after the start or stop.
        """
        work = self._work
        if work is None or postponed(partial(self.close, closing, timeout_s)):
            return
        self.leave()
        try:
            private_loop.close_and_wait(
                partial(self._end, work, closing), partial(work.close, closing), timeout_s
            )
        finally:
            self._hand_back(work)

    async def aclose(self, closing: Closing) -> asyncio.CancelledError | None:
        """Close the capture without blocking the event loop. Return a cancellation that arrived meanwhile, or
        None.
        """
        work = self._work
        if work is None:
            return None
        self.leave()
        self._closing_on = running_loop()
        try:
            job, interruption = private_loop.begin_closing(
                partial(self._end, work, closing), partial(work.close, closing)
            )
            cancelled = await private_loop.uninterrupted(job)
        finally:
            self._closing_on = None
            self._hand_back(work)
        if interruption is not None:
            raise interruption
        job.result()
        return cancelled

    def disown(self) -> None:
        """In a forked child, mark the capture as closed, because it belongs to the parent."""
        if self._work is not None:
            self._work = CaptureWork(self._asked, None, Claim(self._asked.step), 0)
            self._work.state = "closed"

    def _end(self, work: CaptureWork, closing: Closing) -> None:
        """Do the part of the closing that belongs to the caller's thread. Idempotent."""
        if work.has_others:  # workers and engines stop while the profiler of this process stops
            private_loop.submit(work.begin_stopping(closing))
        if work.session is not None:
            work.session.end(discard=closing.discard)

    @staticmethod
    def _hand_back(work: CaptureWork) -> None:
        """Read the clock at the end of the closing."""
        if work.session is not None and work.state == "closed":
            work.session.hand_back()


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on the private loop and return its result. An exception that interrupts the wait is raised
    at once.
    """
    job = private_loop.submit(work)
    job.wait()
    return job.result()


async def _aresult(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as `_result` does, without blocking the event loop."""
    loop = opened_on.set(running_loop())
    try:
        job = private_loop.submit(work)
    finally:
        opened_on.reset(loop)
    await job.ended()
    return job.result()


def _refusal(step: int, other: Claim) -> str:
    """Return the reason why a capture of `step` cannot open while another capture has claimed this
    process.
    """
    state = None if other.taker is None else other.taker.state
    if state is None:
        return (
            f"this process is recorded as a worker in a capture of step {other.step}. "
            "Fix: open captures in one place, the driver"
        )
    return (
        f"a capture of step {other.step} is {state} in this process, and profilers are process-wide. "
        f"Fix: close it before opening step {step}"
    )


def _is_for_the_user(error: BaseException, asked: Asked) -> bool:
    """Return whether an error of the opening is raised. Wrong use of a capture and exceptions of the user's
    code are raised.

    Internal errors, disk errors, and a wrong configuration from a request must not stop a run.
    """
    return isinstance(error, CaptureError) or is_users(error)
