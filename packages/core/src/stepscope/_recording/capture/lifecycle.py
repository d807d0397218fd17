"""Life of one captured step: new -> opening -> open -> closing -> closed.

Closing is a list of stages, `STAGES` at the end of this file: switch off, close the session, stop the
participants, conclude, release. An index moves on when a stage ends. An interrupted stage is entered once
more, then passed over. The interruption is raised after the last stage. A signal's handler and the end of the
process continue at the index too, so a stage may be entered twice. Opening that fails or is cancelled is
rolled back by the same stages.

`close` goes through the stages in order. So does `aclose`, but it tells workers and engines to stop before
this process closes its session, and waits for them after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

from stepscope._recording.after import pipeline
from stepscope._recording.capture import conclusion, configure, on_demand
from stepscope._recording.capture.asked import Asked, Closing
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.capture.opening import is_for_the_user, make_session, refusal
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.fanout.messages import StopRequest
from stepscope._recording.fanout.participants import Participants
from stepscope._recording.instrument import no_step
from stepscope._recording.process import failures, private_loop, run, versions
from stepscope._recording.process.failures import describe
from stepscope._recording.session import activation
from stepscope._recording.session.claims import Claim, Taker
from stepscope._recording.session.session import Session
from stepscope.engines.own_thread import own_thread
from stepscope.errors import CaptureError, CaptureOpenError, ours
from stepscope.files.manifest.records import Ending, Manifest


class Lifecycle:
    """Opens and closes one capture."""

    def __init__(self, asked: Asked, taker: Taker) -> None:
        """Args: taker: The holder of the claim on the process."""
        self.state: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self.asked = asked
        self.session: Session | None = None
        self.participants: Participants | None = None
        self.result: CaptureResult | None = None
        """None until it opens, and in a forked child."""
        self.claim: Claim | None = None
        """The claim that holds the process, or held it."""
        self._taker = taker
        self._files: CapturedFiles | None = None
        self._manifest: Manifest | None = None
        """Manifest at the close of the capture."""
        self._index = 0
        """Index of the next closing stage."""
        self._interrupted: int | None = None
        """Index of the stage that was interrupted last."""
        self._lock = threading.RLock()  # a signal's handler may go on with what it interrupts
        self._task: asyncio.Task[object] | None = None
        """Task that closes this."""
        self._stop: asyncio.Task[object] | None = None
        """Task that tells the workers and engines to stop, or did."""
        self._is_handed_over = False

    def _is_opening(self) -> bool:
        return self.state == "opening"

    def open(self, began_ns: int) -> None:
        """Open, on the thread whose work is recorded."""
        claim = Claim(self.asked.step, self._taker)
        try:
            session = self._take_process(claim, began_ns)
            if session is not None:
                session.open_files()
                if self.participants is not None:
                    private_loop.run(self._start_participants(self.participants, session))
                self._begin(session)
        except BaseException as error:
            reason = self._rolled_back(claim, error)
            self.close(Closing(Ending("rollback", reason), discard=reason))
            self._fail(error, reason)

    async def aopen(self, began_ns: int) -> None:
        """As `open`, without blocking the event loop. Cancelled, it rolls back first."""
        claim = Claim(self.asked.step, self._taker)
        try:
            session = self._take_process(claim, began_ns)
            if session is not None:
                await own_thread(session.open_files)
                if self.participants is not None:
                    await self._start_participants(self.participants, session)
                self._begin(session)
        except BaseException as error:
            reason = self._rolled_back(claim, error)
            cancelled = await self.aclose(Closing(Ending("rollback", reason), discard=reason))
            self._fail(error, reason)
            if cancelled is not None:
                raise cancelled from None

    def _rolled_back(self, claim: Claim, error: BaseException) -> str:
        """Return the reason of a roll-back. Raise if there is nothing to undo."""
        if self.claim is not claim:  # refused, or interrupted before there was anything
            claim.free()
            raise error
        return f"opening failed: {describe(error)}"

    def _fail(self, error: BaseException, reason: str) -> None:
        self._end_what_opened_late()
        conclusion.tell_asker(self.asked, reason)
        if self.asked.config.instrument:
            no_step.failed(error, self.asked.config)
        if is_for_the_user(error, self.asked):
            raise error
        failures.note("opening a capture", error)

    def _take_process(self, claim: Claim, began_ns: int) -> Session | None:
        """Claim this process for this capture, or refuse. Raises before anything is written or started.

        Returns:
            The session to open; None if a signal's handler closed the capture meanwhile.
        """
        asked = self.asked
        if self.state != "new":
            raise CaptureError(
                f"this capture of step {asked.step} is {self.state}; make a new one with capture()"
            )
        other = claim.take()
        if other is not None:
            raise CaptureOpenError(refusal(asked.step, other))
        self.claim, self.state = claim, "opening"
        if asked.workers is not None or asked.engines is not None:
            self.participants = Participants(asked.workers, asked.engines, checked=True)
        on_ray = self.participants is not None and self.participants.fleet is not None
        configure.check(asked.config, on_ray=on_ray)
        if asked.config.instrument:
            configure.instrument(asked.config)
        session = make_session(asked, self.participants, began_ns)
        files = CapturedFiles(session, self.participants)
        result, self.result = self.result, CaptureResult(asked.step, files)
        self._files, self.session = files, session
        if not self._is_opening() and not session.ended:  # closed before there was a session
            self.session, self._files, self.result = None, None, result
            self._end_what_opened_late()
            return None
        return session

    async def _start_participants(self, participants: Participants, session: Session) -> None:
        await participants.start()
        if not self._is_opening():
            # A signal's handler closed this, and the process goes on: what has started since is told too.
            part = session.manifest_part.record
            ending = None if part.ended_by is None else Ending(part.ended_by, part.error or "")
            await self._tell_to_stop(participants, session, Closing(ending))
        elif self.asked.on_request:
            on_demand.tell_others(session.step, participants.taking_part())

    def _begin(self, session: Session) -> None:
        """Do the last part of opening, on the thread whose work is recorded."""
        if self._is_opening():
            run.record(session.config, versions.versions)
            pipeline.promise(session, alone=self.participants is None)
            session.start_profiler()
            activation.activate(session)
        if self._is_opening():
            self.state = "open"
            if session.config.instrument:
                no_step.captured(session.config)
        self._end_what_opened_late()

    def _end_what_opened_late(self) -> None:
        """End what was opened since a signal's handler, or another thread, closed this."""
        if self.session is None:
            self._free()
            self.state = "new"  # nothing was begun: it may be opened once more
        elif self.state == "closed":
            self.session.end_what_opened_late()
            _write_manifest(self.session)

    def leave(self) -> None:
        """Read the clock at which the step ends, before all else that closing does."""
        if self.session is not None and self.state in ("opening", "open"):
            self.session.leave()

    def is_left_to_a_task(self) -> bool:
        """Return whether a task is closing this, in a loop that runs."""
        task = self._task
        return task is not None and not task.done() and task.get_loop().is_running()

    def close(self, closing: Closing) -> None:
        """Close on this thread, or go on with a closing that was interrupted."""
        self.leave()
        try:
            self._finish(closing)
        finally:
            self._note_end_of_closing()

    async def aclose(self, closing: Closing) -> asyncio.CancelledError | None:
        """Close without blocking the event loop. Return the cancellation that came meanwhile."""
        if self.is_left_to_a_task():
            return None
        self.leave()
        try:
            return await private_loop.uninterrupted(self._close_in_task(closing))
        finally:
            self._note_end_of_closing()

    @staticmethod
    def raise_cancellation(cancelled: asyncio.CancelledError, *, now: bool) -> None:
        """Raise the cancellation that came while a capture closed.

        Args:
            now: False if another error goes up, which it would replace. It is raised at the task's next wait.
        """
        if now:
            raise cancelled
        private_loop.cancel_later(cancelled)

    async def _close_in_task(self, closing: Closing) -> None:
        if self.is_left_to_a_task() or not self._lock.acquire(blocking=False):
            return  # a task or another thread goes through the stages
        self._lock.release()
        session = self._begin_closing()
        if session is None:
            return
        self._task, stopping = asyncio.current_task(), None
        try:
            if self.participants is not None and not self._is_told():
                self._go_through(closing, until=STAGES.index(Lifecycle.close_session))
                stopping = asyncio.ensure_future(self._tell_to_stop(self.participants, session, closing))
                await asyncio.sleep(0)  # the participants are told before this process pays for its own stop
                self._go_through(closing, until=STAGES.index(Lifecycle.stop_participants))
                await stopping
        except ours() as failure:
            failures.note("closing a capture", failure)
        except BaseException:
            if stopping is not None and not stopping.done():
                self._stop = None  # a Ctrl-C that ends the loop: it goes no further there
            raise
        finally:  # the stages that are left
            self._task = None
            self._finish(closing)

    def _finish(self, closing: Closing) -> None:
        """Go through all stages that are left, also if a Ctrl-C comes between two of them."""
        try:
            self._go_through(closing)
        except BaseException:
            self._go_through(closing)
            raise

    def _begin_closing(self) -> Session | None:
        """Return the session to close; None if there is nothing to close."""
        if self.state == "open" or (self.state == "opening" and self.session is not None):
            self.state = "closing"
        elif self.state == "opening":
            self.state = "closed"  # who opens it sees that
        if self.state == "closing" and self._index == len(STAGES):
            self.state = "closed"  # a signal's handler closed it in the last moment of its opening
        return self.session if self.state == "closing" else None

    def _go_through(self, closing: Closing, until: int | None = None) -> None:
        """Go on with the stages. A Ctrl-C is raised once they are done: it must leave nothing recording.

        Args:
            until: Index of the stage to stop before, or None to do all.
        """
        # Another thread goes on by itself. Waiting for it may deadlock: a handler holds what it interrupted.
        session = self._begin_closing()
        if session is None or not self._lock.acquire(blocking=False):
            return
        interruption: BaseException | None = None
        index, end = self._index, len(STAGES) if until is None else until
        try:
            while True:
                try:
                    while (index := self._index) < end:
                        self._do(index, session, closing)
                    break
                except BaseException as error:
                    interruption = interruption or error
                    if self._interrupted == index == self._index:  # twice: go on with what is known
                        self._index = index + 1
                    self._interrupted = index
            if interruption is not None and self._index > STAGES.index(Lifecycle.close_session):
                # A signal's handler passed over what an interrupted `close_session` left.
                self.close_session(session, closing)
                _write_manifest(session)
        finally:
            self._lock.release()
        if interruption is not None:
            raise interruption

    def _do(self, index: int, session: Session, closing: Closing) -> None:
        try:
            STAGES[index](self, session, closing)
        except ours() as error:
            self._pass(index, session)
            failures.note("closing a capture", error)
        else:
            self._pass(index, session)

    def _pass(self, index: int, session: Session) -> None:
        if self._index > index:  # a signal's handler went on, on top of this
            _write_manifest(session)
        else:
            self._index = index + 1

    def switch_off(self, session: Session, closing: Closing) -> None:
        """Accept no more spans in this process."""
        activation.deactivate(session)

    def close_session(self, session: Session, closing: Closing) -> None:
        """Stop this process' profiler, and end its files."""
        session.close(ending=closing.ending, discard=closing.discard)

    def stop_participants(self, session: Session, closing: Closing) -> None:
        """Stop the workers and engines, unless they are told already."""
        if self.participants is None or self._is_told():
            return
        stop = self._tell_to_stop(self.participants, session, closing)
        try:
            private_loop.run(stop, keep=True)  # a Ctrl-C must not leave them recording
        except ours() as failure:
            stop.close()
            failures.note("stopping workers and engines", failure)

    def conclude(self, session: Session, closing: Closing) -> None:
        """Write the manifest as it stands now, and act on it. Files that come later fold it again."""
        if closing.discard is None:
            self._manifest = conclusion.conclude(self.asked, session, self.participants)
        else:
            conclusion.discard(self.asked, session, closing.discard)

    def release(self, session: Session, closing: Closing) -> None:
        """Free the process for the next capture, and queue the work that follows this one."""
        self._free()
        try:
            session.write_cost()  # before the chores, which read it
            pipeline.fold_when_written(session)
            if self._manifest is not None and self._files is not None and not self._is_handed_over:
                conclusion.tell_summary(session, self._files, self._manifest)
                if not self._is_handed_over:  # a signal's handler may have come in between
                    self._is_handed_over = True
                    pipeline.hand_over(self._files, self.result, session)
        finally:
            self.state = "closed"

    def _is_told(self) -> bool:
        """Return whether the workers and engines are being told to stop, or were."""
        return self._stop is not None and (self._stop.done() or self._stop.get_loop().is_running())

    async def _tell_to_stop(self, participants: Participants, session: Session, closing: Closing) -> None:
        self._stop = asyncio.current_task()
        request = StopRequest(capture_id=session.capture_id, ending=closing.ending, discard=closing.discard)
        seconds = session.config.budget.fanout_seconds if closing.deadline_s is None else closing.deadline_s
        try:
            await participants.stop(request, seconds)
        except BaseException as failure:
            if not isinstance(failure, Exception):
                self._stop = None  # their loop is shut down: who goes on closing tells them again
            raise
        if self._index > STAGES.index(Lifecycle.conclude):  # interrupted, the caller did not wait
            _write_manifest(session)

    def _free(self) -> None:
        if self.claim is not None:
            self.claim.free()

    def _note_end_of_closing(self) -> None:
        """Read the clock at which closing ends, after all else that it does."""
        if self.session is not None and self.state == "closed":
            self.session.hand_back()


def _write_manifest(session: Session) -> None:
    session.manifest_part.write()
    session.manifest_part.fold(session.layout)


STAGES: tuple[Callable[[Lifecycle, Session, Closing], None], ...] = (
    Lifecycle.switch_off,
    Lifecycle.close_session,
    Lifecycle.stop_participants,
    Lifecycle.conclude,
    Lifecycle.release,
)
"""Stages of closing, in the order of `close`. Traces may still be written when the last one ends."""
