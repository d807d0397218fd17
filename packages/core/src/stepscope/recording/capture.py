"""capture(step): opens one step's recording in this process, its workers and its engines, and closes it on
every path.

The only writer of `runtime.active`. Life of a capture: new -> opening -> open -> closing -> closed; opening
that fails or is cancelled is rolled back to closed. For a step that the configuration does not select,
everything is a no-op.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from contextvars import Token
from typing import TYPE_CHECKING, Any, Literal

from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError, CaptureOpenError, ConfigError
from stepscope.files.manifest import Absent
from stepscope.recording import guard, loop, run, runtime, shutdown
from stepscope.recording.context import Scope, current
from stepscope.recording.engine_group import EngineGroup, profilers_of
from stepscope.recording.identity import identify
from stepscope.recording.result import CaptureResult
from stepscope.recording.session import Session
from stepscope.recording.spans import describe

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepscope.recording.fleet_port import Fleet, WorkerOutcome

_open: Capture | None = None
"""The capture of this process that is opening or open. One writer: this module."""


def activate(session: Session) -> None:
    """Switches recording on in this process."""
    shutdown.install(close_everything)
    runtime.active = session


def deactivate(session: Session) -> None:
    """Switches it off, if it is this session that is on."""
    if runtime.active is session:
        runtime.active = None


def close_everything(reason: str, deadline_s: float) -> None:
    """The process is about to end: closes what is open here, files included, within about twice
    `deadline_s`.
    """
    from stepscope.recording import export

    if _open is not None:
        _open.close(error=reason, deadline_s=deadline_s)
    session = runtime.active
    if session is not None:
        deactivate(session)
        session.close(error=reason)
    export.exporter().drain(deadline_s)


def capture(
    step: int,
    *,
    workers: object = None,
    engines: object = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
    rank: int | None = None,
) -> Capture:
    """Records one step, if the configuration selects it: `with`, `async with`, or `open()` and `close()`.

    Args:
        step: Global number of the step, 0 or more.
        workers: Processes to record too: a Ray actor handle, a sequence of them in rank order, or {role:
            handles}. Nothing has to be added to their classes.
        engines: Inference engines to record too: engine objects that an installed adapter knows, or
            `EngineProfiler`s. config: Instead of what `configure` and the environment say. role: This
            process' own role. rank: This process' own rank, where neither the environment nor
            torch.distributed says it.

    Raises:
        ConfigError: at once, for wrong arguments or a wrong configuration.
        CaptureOpenError: on opening, while another capture is open in this process.
        CaptureError: on opening synchronously inside a running event loop with workers or engines: it would
            block it.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(
            "capture(step)", step, "an integer, 0 or more", "pass the global step of the training loop"
        )
    return Capture(step, workers, engines, config if config is not None else run.current(), role, rank)


class Capture:
    """The recording of one step. Made by `capture`; `result` says what became of it."""

    def __init__(
        self, step: int, workers: object, engines: object, config: ProfileConfig, role: str, rank: int | None
    ) -> None:
        self.step = step
        self.config = config
        self.selected = config.selects(step)
        self.result = CaptureResult(step=step, captured=False)
        self._state: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self._workers = workers
        self._engines = engines
        self._role = role
        self._rank = rank
        self._session: Session | None = None
        self._fleet: Fleet | None = None
        self._group: EngineGroup | None = None
        self._scope: Token[Scope | None] | None = None
        self._capture_id = ""

    # Opening.

    def open(self) -> Self:
        """Opens the capture. A no-op for a step that is not selected."""
        if not self.selected:
            return self
        self._refuse_to_block_a_loop("open")
        session = self._claim()
        try:
            session.open_files()
            if self._remote:
                loop.run(self._start_remote(session))
            self._begin(session)
        except BaseException as error:
            self._roll_back(session, error)
            raise
        return self

    async def aopen(self) -> Self:
        """As `open`, without blocking the event loop."""
        if not self.selected:
            return self
        session = self._claim()
        try:
            await asyncio.to_thread(session.open_files)
            if self._remote:
                await self._start_remote(session)
            self._begin(session)
        except BaseException as error:
            await _uninterrupted(self._roll_back_async(session, error))
            raise
        return self

    def _claim(self) -> Session:
        """Takes this process for this capture and builds what needs no waiting. Raises before anything is
        written.
        """
        global _open
        if self._state != "new":
            raise CaptureError(
                f"this capture of step {self.step} is {self._state}; make a new one with capture(step)"
            )
        if _open is not None:
            raise CaptureOpenError(
                f"a capture of step {_open.step} is {_open._state} in this process, and profilers are process-wide. "
                f"Fix: close it before opening step {self.step}"
            )
        if runtime.active is not None:
            raise CaptureOpenError(
                f"this process is being recorded as a worker in a capture of step {runtime.active.step}. "
                "Fix: open captures in one place, the driver"
            )
        run.check(self.config, on_ray=self._workers is not None)
        profilers = profilers_of(self._engines) if self._engines is not None else []
        if self._workers is not None:
            from stepscope.recording.fleet_port import load_fleet

            self._fleet = load_fleet(self._workers)
        self._capture_id = secrets.token_hex(8)
        session = Session(
            config=self.config,
            step=self.step,
            process=identify(self._role, rank=self._rank),
            roles=(self._role,),
            run_id=run.run_id(),
            capture_id=self._capture_id,
            owner=True,
        )
        if profilers:
            self._group = EngineGroup(
                profilers,
                config=self.config,
                layout=session.layout,
                ledger=session.ledger,
                step=self.step,
                name=f"step_{self.step:06d}_{session.run_id}",
            )
        self._state, self._session, _open = "opening", session, self
        self.result = CaptureResult(step=self.step, captured=True, session=session, fleet=self._fleet)
        return session

    @property
    def _remote(self) -> bool:
        return self._fleet is not None or self._group is not None

    async def _start_remote(self, session: Session) -> None:
        """Workers and engines at once; then what became of each is in the ledger."""
        began = time.monotonic_ns()
        deadline_s = self.config.budget.fanout_seconds
        await asyncio.gather(self._start_workers(session, deadline_s), self._start_engines(deadline_s))
        session.ledger.spend(start_ns=time.monotonic_ns() - began)

    async def _start_workers(self, session: Session, deadline_s: float) -> None:
        if self._fleet is None:
            return
        from stepscope.recording.worker import StartRequest

        request = StartRequest(
            capture_id=self._capture_id, run_id=session.run_id, step=self.step, config=self.config
        )
        _record(session, await self._fleet.start(request, deadline_s))

    async def _start_engines(self, deadline_s: float) -> None:
        if self._group is not None:
            await self._group.start(deadline_s)

    def _begin(self, session: Session) -> None:
        """The last part of opening, on the thread whose work is recorded."""
        run.record(self.config)
        session.start_profiler()
        activate(session)
        # A span left open by an earlier capture must not become the parent of this one's.
        self._scope = current.set(None) if _stale() else None
        self._state = "open"

    # Closing.

    def close(self, error: str | None = None, deadline_s: float | None = None) -> None:
        """Closes the capture. Idempotent; never raises for trouble of our own.

        Args:
            error: Why it ended, if not normally.
            deadline_s: For each worker and engine, instead of `budget.fanout_seconds`.
        """
        session = self._leave()
        if session is None:
            return
        try:
            session.close(error=error)
            if self._remote:
                loop.run(self._stop_remote(session, error, deadline_s, None))
        except Exception as failure:
            guard.note("closing a capture", failure)
        finally:
            self._finish(session)

    async def aclose(self, error: str | None = None) -> None:
        """As `close`, without blocking the event loop. Being cancelled meanwhile does not interrupt it."""
        session = self._leave()
        if session is None:
            return
        cancelled = await _uninterrupted(self._close_async(session, error))
        if cancelled is not None and error is None:
            raise cancelled

    async def _close_async(self, session: Session, error: str | None) -> None:
        try:
            remote = asyncio.ensure_future(self._stop_remote(session, error, None, None))
            await asyncio.sleep(0)  # the workers are asked before this process pays for its own stop
            session.close(error=error)
            await remote
        except Exception as failure:
            guard.note("closing a capture", failure)
        finally:
            await asyncio.to_thread(self._finish, session)

    def _leave(self) -> Session | None:
        """Stops recording at once; None when there is nothing to close."""
        session = self._session
        if session is None or self._state not in ("open", "opening"):
            return None
        self._state = "closing"
        deactivate(session)
        if self._scope is not None:
            _reset(self._scope)
        return session

    async def _stop_remote(
        self, session: Session, error: str | None, deadline_s: float | None, discard: str | None
    ) -> None:
        deadline_s = self.config.budget.fanout_seconds if deadline_s is None else deadline_s
        await asyncio.gather(
            self._stop_workers(session, error, deadline_s, discard), self._stop_engines(deadline_s)
        )

    async def _stop_workers(
        self, session: Session, error: str | None, deadline_s: float, discard: str | None
    ) -> None:
        if self._fleet is None:
            return
        from stepscope.recording.worker import StopRequest

        request = StopRequest(capture_id=self._capture_id, error=error, discard=discard)
        _record(session, await self._fleet.stop(request, deadline_s))

    async def _stop_engines(self, deadline_s: float) -> None:
        if self._group is not None:
            await self._group.stop(deadline_s)

    def _finish(self, session: Session) -> None:
        """The last word in the manifest; the process is free for the next capture."""
        global _open
        try:
            session.ledger.write()
            self.result.fold()
            for line in self.result.problems():
                guard.log.warning("stepscope: step %d: %s", self.step, line)
        except Exception as failure:
            guard.note("writing the manifest", failure)
        finally:
            self._state = "closed"
            if _open is self:
                _open = None

    def _roll_back(self, session: Session, error: BaseException) -> None:
        reason = f"opening failed: {describe(error)}"
        self._leave()
        try:
            session.close(error=reason, discard=reason)
            if self._remote:
                loop.run(self._stop_remote(session, reason, None, reason))
        except Exception as failure:
            guard.note("rolling back a capture", failure)
        finally:
            self._finish(session)

    async def _roll_back_async(self, session: Session, error: BaseException) -> None:
        reason = f"opening failed: {describe(error)}"
        self._leave()
        try:
            session.close(error=reason, discard=reason)
            await self._stop_remote(session, reason, None, reason)
        except Exception as failure:
            guard.note("rolling back a capture", failure)
        finally:
            self._finish(session)

    # With and async with.

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else describe(error))

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(None if error is None else describe(error))

    def _refuse_to_block_a_loop(self, verb: str) -> None:
        if self._workers is None and self._engines is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise CaptureError(
            f"{verb}() with workers or engines would block the running event loop. "
            "Fix: `async with capture(step, ...)`, or `await` aopen() and aclose()"
        )


def _record(session: Session, outcomes: list[WorkerOutcome]) -> None:
    """Workers that did not answer well, and the clocks of those that did."""
    for outcome in outcomes:
        if outcome.state != "ok":
            absent = Absent(
                name=outcome.name, state=outcome.state, reason=outcome.reason or "", process=outcome.process
            )
            session.ledger.add_absent((absent,))
    clocks = tuple(outcome.clock for outcome in outcomes if outcome.clock is not None)
    session.ledger.add_clocks(clocks)


def _stale() -> bool:
    return current.get() is not None


def _reset(token: Token[Scope | None]) -> None:
    try:
        current.reset(token)
    except ValueError:
        pass  # closed in another task than it was opened in


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Runs `work` to its end though the waiting task is cancelled; returns the cancellation that came, if one
    did.
    """
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break  # the loop is shutting down and took our task with it
            cancelled = error
    return cancelled
