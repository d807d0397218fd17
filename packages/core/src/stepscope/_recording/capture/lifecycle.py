"""Life of one captured step: new -> opening -> open -> closing -> closed.

`CaptureWork` opens and closes on the private loop. The caller waits for this work, and itself does the parts
that belong to its own thread: it starts and stops the profiler (unless that has a thread of its own), and
switches recording on and off. If an
exception (a Ctrl-C, an alarm) interrupts the caller during an opening, the opening is undone before the
exception is raised; during a closing, the closing is completed first.

A closing, in order. On the caller's thread: `Session.leave` reads the clock at the step's end;
`Lifecycle._end` asks workers and engines to stop (`CaptureWork.begin_stopping`), then switches
recording off and stops this process' profiler (`Session.end`). On the private loop, while the caller waits:
`CaptureWork._close` writes the spans and counters (`Session._write`), awaits workers and engines, writes the
manifest (`conclusion.conclude`) and frees the process. The caller's code then goes on (`Session.hand_back`).
After that, on the exporter's thread (`output.Exporter`): traces and their sidecars, hooks, and the manifest
once more (`pipeline.fold_when_written`).
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
from stepscope.backends.threaded.undisturbed import postponed, undisturbed
from stepscope.engines.own_thread import opened_on, own_thread
from stepscope.errors import CaptureError, CaptureOpenError, is_users
from stepscope.files.manifest.records import Ending

T = TypeVar("T")


class Lifecycle:
    """The opening and closing of one capture."""

    def __init__(self, asked: Asked, taker: Taker) -> None:
        """Args: taker: The holder of the claim on the process."""
        self._asked = asked
        self._taker = taker
        self._work: CaptureWork | None = None
        """The work of the capture; None before it opens, and in a forked child."""
        self._closing_on: asyncio.AbstractEventLoop | None = None
        """Event loop of the task that is closing the capture, or None if no task is."""

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
        """Open the capture, on the thread whose work is recorded."""
        work = self._take_process(began_ns)
        if work is None:
            return
        try:
            session = _result(work.begin())
            if session is None:
                return
            undisturbed(session.prepare_profiler)  # on another thread torch logs an error
            _result(work.open(session))
            undisturbed(partial(self._begin, work, session))
        except BaseException as error:
            closing = self._undo(work, error)
            self.close(closing)
            self._fail(error, closing.discard)

    async def aopen(self, began_ns: int) -> None:
        """Open the capture without blocking the event loop. If this is cancelled, the opening is undone
        first.
        """
        work = self._take_process(began_ns)
        if work is None:
            return
        try:
            session = await _aresult(work.begin())
            if session is None:
                return
            await own_thread(session.prepare_profiler)  # it may take seconds
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
            The work of the capture, or None if the capture is not possible, for a recorded reason.

        Raises:
            CaptureError: another capture has claimed the process, or this capture was used before.
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
        """Do the last part of opening, on the thread whose work is recorded."""
        if work.state != "opening":
            return  # a signal's handler, or another thread, closed this meanwhile
        session.start_profiler()
        activation.activate(session)
        if work.state == "opening":
            work.state = "open"
            if session.config.instrument:
                no_step.captured(session.config)

    @staticmethod
    def _undo(work: CaptureWork, error: BaseException) -> Closing:
        """Return the arguments for closing after an error interrupted the opening."""
        if work.state in ("closing", "closed") and not is_users(error):
            return Closing()  # a signal's handler, or another thread, closed this: the error comes of that
        reason = f"opening failed: {describe(error)}"
        return Closing(Ending("rollback", reason), discard=reason)

    def _fail(self, error: BaseException, reason: str | None) -> None:
        """Record or raise the error of an opening. `reason` is None if other code closed the capture on
        purpose, which is no error.
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
        """Read the clock at which the step ends, before any other part of closing."""
        if self.session is not None and self.state in ("opening", "open"):
            self.session.leave()

    def is_left_to_a_task(self) -> bool:
        """Return whether a task of this thread's event loop is closing the capture, so that a wait would
        block that task.
        """
        return self._closing_on is not None and self._closing_on is running_loop()

    def close(self, closing: Closing, timeout_s: float | None = None) -> None:
        """Close the capture, and wait until it is closed, or for `timeout_s`.

        In a signal's handler that interrupted a start or stop of the profiler on this thread, it returns at
        once; the capture is closed after that start or stop.
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
        """Close without blocking the event loop. Return the cancellation that arrived meanwhile, or None."""
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
        """Leave the capture to the parent, in a forked child."""
        if self._work is not None:
            self._work = CaptureWork(self._asked, None, Claim(self._asked.step), 0)
            self._work.state = "closed"

    def _end(self, work: CaptureWork, closing: Closing) -> None:
        """Do the part of closing that belongs to the caller's thread. Idempotent."""
        if work.has_others:  # they stop while the profiler here does
            private_loop.submit(work.begin_stopping(closing))
        if work.session is not None:
            work.session.end(discard=closing.discard)

    @staticmethod
    def _hand_back(work: CaptureWork) -> None:
        """Read the clock at which closing ends, after every other part of closing."""
        if work.session is not None and work.state == "closed":
            work.session.hand_back()


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` on the private loop. An exception that interrupts the wait is raised at
    once.
    """
    job = private_loop.submit(work)
    job.wait()
    return job.result()


async def _aresult(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` as `_result` does, without blocking the event loop."""
    loop = opened_on.set(running_loop())
    try:
        job = private_loop.submit(work)
    finally:
        opened_on.reset(loop)
    await job.ended()
    return job.result()


def _refusal(step: int, other: Claim) -> str:
    """Return the reason why a capture of `step` may not open while another claim holds this process."""
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
    """Return whether an error of opening is raised to the user: a wrong argument, or an exception of the
    user's own.

    Internal failures, disk errors, and a wrong configuration from a request do not stop a run.
    """
    return isinstance(error, CaptureError) or is_users(error)
