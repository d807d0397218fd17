"""Work of one capture on the private loop: everything except the profiler's window, which belongs to the
recorded thread.

After the profiler has stopped, a close has four stages: close this process' files, wait for the workers and
engines, complete the manifest, and free the process for the next capture.

The private loop runs on one thread, so the work needs no lock, and signals do not interrupt it. A second call
of `close` waits for the first. `close` also undoes an opening that failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Literal

from stepscope._recording.capture import conclusion, omissions, on_demand
from stepscope._recording.capture.asked import Asked, Closing
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.fanout.messages import StopRequest
from stepscope._recording.fanout.participants import Participants
from stepscope._recording.process import failures, identity
from stepscope._recording.process.identity import identify
from stepscope._recording.session import pipeline
from stepscope._recording.session.activation import Claim
from stepscope._recording.session.session import Session
from stepscope.errors import ours
from stepscope.files.manifest import Manifest

_CANCEL_S = 5.0
"""Longest wait for a cancelled opening to end."""


class CaptureWork:
    """The opening and closing of one capture: its session, workers and engines."""

    def __init__(self, asked: Asked, participants: Participants | None, claim: Claim, began_ns: int) -> None:
        self.state: Literal["new", "opening", "open", "closing", "closed"] = "opening"
        self.session: Session | None = None
        self.result: CaptureResult | None = None
        """The result, or None before the session exists."""
        self._asked = asked
        self._participants = participants
        self._claim = claim
        self._began_ns = began_ns
        self._files: CapturedFiles | None = None
        self._manifest: Manifest | None = None
        """The manifest at the close, or None."""
        self._opening: asyncio.Task[object] | None = None
        self._stopping: asyncio.Task[None] | None = None
        """The task that stops the workers and engines, or None."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def has_others(self) -> bool:
        """True if the capture was given workers or engines."""
        return self._participants is not None

    async def begin(self) -> Session | None:
        """Make a session, open its files, and return the session. Return None if the capture was closed
        before.
        """
        if self.state != "opening":
            return None
        session = _make_session(self._asked, self._participants, self._began_ns)
        self._files, self.session = CapturedFiles(session, self._participants), session
        self.result = CaptureResult(self._asked.step, self._files)
        session.open_files()
        return session

    async def open(self, session: Session) -> None:
        """Start the workers and engines, then create the span file and the counter file."""
        if self.state != "opening":
            return  # the capture was closed meanwhile
        self._opening = asyncio.current_task()
        participants = self._participants
        if participants is not None:
            await participants.start()
            if self._asked.on_request:
                on_demand.tell_others(session.step, participants.taking_part())
        identity.record_run(session.config)
        pipeline.promise(session, alone=participants is None)
        session.open_logs()

    async def begin_stopping(self, closing: Closing) -> None:
        """Begin to stop the workers and engines. If the opening is still starting them, cancel the
        opening first.
        """
        if self.state in ("opening", "open"):
            self.state = "closing"
        opening = self._opening
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait({opening}, timeout=_CANCEL_S)
        if self._stopping is None and self._participants is not None and self.session is not None:
            self._stopping = asyncio.ensure_future(self._stop(self._participants, self.session, closing))

    async def close(self, closing: Closing) -> None:
        """Close the capture. A second call waits for the first, and may shorten the wait for other
        processes.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(closing))
        # The second call has a time limit, as at the end of the process. Wait no longer than that for others.
        elif self._stopping is not None and closing.deadline_s is not None:
            asyncio.get_running_loop().call_later(closing.deadline_s, self._stopping.cancel)
        await asyncio.shield(self._closing)

    async def _close(self, closing: Closing) -> None:
        await self.begin_stopping(closing)
        session = self.session
        if session is None:  # nothing has begun, so the capture may be opened again
            self._claim.free()
            self.state = "new"
            return
        stages: tuple[Callable[[Session, Closing], Awaitable[None] | None], ...] = (
            self._close_session,
            self._await_others,
            self._conclude,
            self._release,
        )
        trouble: BaseException | None = None
        for stage in stages:
            try:
                waiting = stage(session, closing)
                if waiting is not None:
                    await waiting
            except BaseException as error:  # SystemExit too, because this is a thread of stepscope
                trouble = trouble or _noted(error)
        self._claim.free()  # again, in case `_release` failed earlier
        self.state = "closed"
        if trouble is not None:
            raise trouble

    async def _stop(self, participants: Participants, session: Session, closing: Closing) -> None:
        request = StopRequest(capture_id=session.capture_id, ending=closing.ending, discard=closing.discard)
        seconds = session.config.budget.fanout_seconds if closing.deadline_s is None else closing.deadline_s
        try:
            await participants.stop(request, seconds)
        except ours() as error:
            failures.note("stopping workers and engines", error)

    def _close_session(self, session: Session, closing: Closing) -> None:
        session.close(ending=closing.ending, discard=closing.discard)

    async def _await_others(self, session: Session, closing: Closing) -> None:
        """Wait until the workers and engines have stopped, or their deadline is over."""
        if self._stopping is not None:
            session.manifest_part.write()
            await asyncio.wait({self._stopping})

    def _conclude(self, session: Session, closing: Closing) -> None:
        """Complete the manifest, and log its problems. `manifest.json` is written later."""
        # Written before the programs after the capture start, because they read the cost.
        session.write_cost()
        if closing.discard is None:
            self._manifest = conclusion.conclude(self._asked, session, self._participants)
        else:
            conclusion.discard(self._asked, session, closing.discard)

    def _release(self, session: Session, closing: Closing) -> None:
        """Free the process for the next capture, and queue the work after this capture."""
        self._claim.free()
        pipeline.fold_when_written(session)
        if self._manifest is not None and self._files is not None:
            pipeline.hand_over(self._files, self.result, session)
            conclusion.tell_summary(session, self._files, self._manifest)


def _make_session(asked: Asked, participants: Participants | None, began_ns: int) -> Session:
    """Return the session of this process, with the participants of the capture."""
    session = Session(
        config=asked.config,
        step=asked.step,
        process=identify(asked.role, rank=asked.rank),
        roles=(asked.role,),
        run_id=identity.run_id(),
        capture_id=os.urandom(8).hex(),
        owner=True,
        began_ns=began_ns,
        opened_by=asked.opened_by,
        on_artifact=pipeline.artifact_done,
    )
    if participants is not None:
        participants.join(session)
    if not asked.names_workers:
        omissions.enter_missing_workers(
            session.manifest_part, engines=asked.engines is not None, opened_by=asked.opened_by
        )
    return session


def _noted(error: BaseException) -> BaseException | None:
    """Record an error of the closing. Return the error if errors should be raised (STEPSCOPE_RAISE, in
    tests).
    """
    try:
        failures.note("closing a capture", error)
    except BaseException as raised:
        return raised
    return None
