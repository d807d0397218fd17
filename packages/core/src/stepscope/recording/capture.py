"""capture(step): records one step in this process, its workers and its engines, and closes on every path.

The only writer of `runtime.active`. Life of a capture: new -> opening -> open -> closing -> closed; opening
that fails or is cancelled is rolled back. For a step that is not selected, all of it is a no-op.

One file above 400 lines: it holds all states of a capture and who may change them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Literal

from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError, CaptureOpenError, ConfigError, StepscopeError
from stepscope.files.layout import RunLayout
from stepscope.recording import export, finish, guard, identity, run, runtime, shutdown, uncaptured, untold
from stepscope.recording.identity import identify
from stepscope.recording.result import CaptureResult
from stepscope.recording.session import Session
from stepscope.recording.spans import describe
from stepscope.recording.windows import in_event_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from stepscope.recording.others import Others

# What needs asyncio or a cluster library is imported where it is used: `import stepscope` is kept light.

_open: Capture | None = None
"""The capture of this process that is opening, open or closing. One writer: this module."""
_wanted: Callable[[ProfileConfig, int, str, int | None, bool], ProfileConfig | None] | None = None
"""`requests.wanted` once a configuration listens: to import it anew would cost a step as much as to ask it.
One writer: `_asked_for`.
"""


def activate(session: Session) -> None:
    """Switches recording on in this process."""
    shutdown.install(close_everything)
    uncaptured.captured_here()
    session.switch_off = deactivate
    runtime.active = session
    if session.ended:  # its watchdog was faster
        deactivate(session)


def opened() -> Capture | None:
    """The capture of this process that is opening, open or closing."""
    return _open


def deactivate(session: Session) -> None:
    """Switches it off, if it is this session that is on."""
    if runtime.active is session:
        runtime.active = None


def close_everything(reason: str, deadline_s: float) -> None:
    """The process is about to end: closes what is open here, and writes the files."""
    if _open is not None:
        _open._close(reason, deadline_s, None)
    if runtime.active is not None:
        runtime.active.close(error=reason)
    uncaptured.flush()
    until = time.monotonic() + deadline_s
    unwritten = export.exporter().drain(deadline_s)
    if unwritten:
        guard.warn("stepscope: lost at the end of the process: %s", ", ".join(unwritten))
    left_s = max(0.0, until - time.monotonic())
    finish.end(reason, left_s, patient=deadline_s >= shutdown.EXIT_S)
    if _wanted is not None:
        from stepscope.recording import requests

        requests.end(reason)


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
        workers: Processes to record too: a Ray actor handle, a sequence of them in rank order, or
            {role: handles}. Nothing has to be added to their classes. An empty one says that there are none.
        engines: Inference engines to record too: `EngineProfiler`s, or engine objects that an installed
            adapter knows; "vllm" stands for all vLLM engines of this process. In their order they are
            replicas 0, 1, 2...
        config: Instead of what `configure` and the environment say.
        role: This process' own role.
        rank: This process' own rank. Else STEPSCOPE_RANK, torch.distributed's, or RANK.

    Raises:
        ConfigError: at once, for wrong arguments or a wrong configuration.
        CaptureOpenError: on opening, while another capture is open in this process.
        CaptureError: on opening inside a running event loop without `async`, with workers or engines.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(
            "capture(step)", step, "an integer, 0 or more", "pass the training loop's global step"
        )
    if step < 0:
        raise ConfigError("capture(step)", step, "0 or more", "pass the training loop's global step")
    return Capture(step, workers, engines, run.current() if config is None else config, role, rank)


def _asked_for(
    config: ProfileConfig, step: int, role: str, rank: int | None, *, alone: bool
) -> ProfileConfig | None:
    """The configuration with which somebody asked for this step on demand; None when nobody did."""
    global _wanted
    if not config.control.requests:
        return None
    if _wanted is None:
        from stepscope.recording.requests import wanted

        _wanted = wanted
    try:
        return _wanted(config, step, role, rank, alone)
    except Exception as error:
        guard.note("looking for requests", error)
        return None


class Capture:
    """The recording of one step. Made by `capture`; `result` says what became of it."""

    def __init__(
        self, step: int, workers: object, engines: object, config: ProfileConfig, role: str, rank: int | None
    ) -> None:
        self.step = step
        if config.instrument:
            from stepscope.recording import unreached

            unreached.reached(config)
        if config.cuda_memory.oom_any_step != "off":
            from stepscope.recording import out_of_memory

            out_of_memory.watch(config, identify(role, rank=rank), run.run_id(), step)
        self._told = workers is not None
        if workers is not None and untold.none_meant(workers):
            workers = None
        asked = _asked_for(config, step, role, rank, alone=workers is not None or engines is not None)
        self.config = config if asked is None else asked
        self._asked_for = asked is not None
        self.selected = self.config.selects(step)
        self._result: CaptureResult | None = None
        self._state: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self._given = (workers, engines)
        self._role = role
        self._rank = rank
        self._session: Session | None = None
        self._others: Others | None = None
        self._told_to_stop = False
        """Whether the others are being stopped, or were."""
        self._closer: int | None = None
        """The thread that closes this. What interrupts it there (a signal) may close in its place."""
        self._closing_in: asyncio.AbstractEventLoop | None = None
        """The loop in which a task is closing this."""
        self._manifest_is_out = False
        """Whether it is being written, or was: what is said later has to be written again."""
        self._uncaptured: uncaptured.Began | None = None
        """Of a step that is not selected, between its opening and its closing."""

    @property
    def result(self) -> CaptureResult:
        """What became of it; once it is open, or for a step that is not selected at any time."""
        if self._result is None:
            self._result = CaptureResult(step=self.step)
        return self._result

    # Opening.

    def open(self) -> Self:
        """Opens the capture. A no-op for a step that is not selected."""
        if not self.selected:
            self._uncaptured = uncaptured.begin()
            return self
        self._refuse_to_block_a_loop()
        self._refuse_unless_free()
        try:
            session = self._claim()
            with session.ledger.opening():
                session.open_files()
                if self._others is not None:
                    from stepscope.recording import loop

                    loop.run(self._start_others(self._others, session))
                self._begin(session)
        except BaseException as error:
            self._roll_back(error)
            if self._is_for_the_user(error):
                raise
            guard.note("opening a capture", error)
        return self

    async def aopen(self) -> Self:
        """As `open`, without blocking the event loop. Cancelled, it rolls back first."""
        if not self.selected:
            self._uncaptured = uncaptured.begin()
            return self
        from stepscope.engines.own_thread import own_thread
        from stepscope.recording import loop

        self._refuse_unless_free()
        try:
            session = self._claim()
            with session.ledger.opening():
                await own_thread(session.open_files)
                if self._others is not None:
                    await self._start_others(self._others, session)
                self._begin(session)
        except BaseException as error:
            reason = f"opening failed: {describe(error)}"
            cancelled = await loop.uninterrupted(self._close_async(reason, discard=reason))
            self._tell_asker(reason)
            if self._is_for_the_user(error):
                raise
            guard.note("opening a capture", error)
            if cancelled is not None:
                raise cancelled from None
        return self

    def _is_for_the_user(self, error: BaseException) -> bool:
        """Whether an error of opening goes up: a slip in what was passed, a cancellation, a Ctrl-C.

        Trouble of ours or of the disk does not stop a run; nor does a configuration that nobody wrote into it
        (a request's).
        """
        if isinstance(error, ConfigError) and self._asked_for:
            return False
        return isinstance(error, StepscopeError) or not isinstance(error, Exception)

    def _claim(self) -> Session:
        """Takes this process for this capture. Raises before anything is written or started."""
        global _open
        workers, engines = self._given
        if workers is not None or engines is not None:
            from stepscope.recording.others import Others

            self._others = Others(workers, engines)
        fleet = None if self._others is None else self._others.fleet
        run.check(self.config, on_ray=fleet is not None)
        if self.config.instrument:
            run.instrument(self.config)
        session = Session(
            config=self.config,
            step=self.step,
            process=identify(self._role, rank=self._rank),
            roles=(self._role,),
            run_id=run.run_id(),
            capture_id=os.urandom(8).hex(),
            owner=True,
        )
        if self._others is not None:
            self._others.join(session)
        self._say_missing_workers(session)
        self._state, self._session, _open = "opening", session, self
        self._result = CaptureResult(step=self.step, session=session, others=self._others)
        return session

    def _say_missing_workers(self, session: Session) -> None:
        reason = None if self._told else untold.missing_workers(engines=self._given[1] is not None)
        if reason is not None:
            untold.warn_once(reason)
            session.ledger.skip(untold.WORKERS, reason)

    def _refuse_unless_free(self) -> None:
        if self._state != "new":
            raise CaptureError(
                f"this capture of step {self.step} is {self._state}; make a new one with capture()"
            )
        if _open is not None:
            raise CaptureOpenError(
                f"a capture of step {_open.step} is {_open._state} in this process, and profilers are "
                f"process-wide. Fix: close it before opening step {self.step}"
            )
        if runtime.active is not None:
            raise CaptureOpenError(
                f"this process is recorded as a worker in a capture of step {runtime.active.step}. "
                "Fix: open captures in one place, the driver"
            )

    async def _start_others(self, others: Others, session: Session) -> None:
        from stepscope.recording.worker import StartRequest

        request = StartRequest(
            capture_id=session.capture_id,
            run_id=session.run_id,
            step=self.step,
            config=self.config,
            owner_part=session.part_name,
        )
        await others.start(request, self.config.budget.fanout_seconds)
        if self._state != "opening":
            # A signal's handler closed this, and the process goes on: what has started since is told too.
            await self._stop_others(others, session, session.ledger.part.error, None, None)
            return
        if self._asked_for:
            from stepscope.recording import requests

            requests.tell_others(self.step, others.taking_part())

    def _begin(self, session: Session) -> None:
        """The last part of opening, on the thread whose work is recorded."""
        if self._state != "opening":
            return
        run.record(self.config)
        finish.promise(session, alone=self._others is None)
        session.start_profiler()
        activate(session)
        if self._state == "opening":
            self._state = "open"

    # Closing.

    def close(self, error: str | None = None, deadline_s: float | None = None) -> None:
        """Closes the capture. Idempotent; what a task is closing is left to it. Trouble of our own goes to
        the manifest and is not raised.

        Args:
            error: Why it ended, if not normally.
            deadline_s: For each worker and engine, instead of `budget.fanout_seconds`.
        """
        if self._closing_in is None or not self._closing_in.is_running():
            self._close(error, deadline_s, None)

    async def aclose(self, error: str | None = None) -> None:
        """As `close`, without blocking the event loop. Being cancelled meanwhile does not interrupt it: that
        is raised afterwards; with an `error`, which goes up, at the task's next await.
        """
        cancelled = await self._aclose(error)
        if cancelled is not None:
            _go_on_cancelled(cancelled, instead=error is None)

    async def _aclose(self, error: str | None) -> asyncio.CancelledError | None:
        """The cancellation that came meanwhile."""
        if self._state not in ("opening", "open"):
            self._say_uncaptured(error)
            return None
        from stepscope.recording import loop

        return await loop.uninterrupted(self._close_async(error))

    def _close(self, error: str | None, deadline_s: float | None, discard: str | None) -> None:
        try:
            self._close_what_is_open(error, deadline_s, discard)
        except BaseException:  # a Ctrl-C: what it cut short is done now
            try:
                self._close_what_is_open(error, deadline_s, discard)
            finally:  # after a second one, with what is known
                if self._state == "closing" and self._session is not None:
                    self._finish(self._session, discard)
            raise

    def _close_what_is_open(
        self, error: str | None, deadline_s: float | None, discard: str | None = None
    ) -> None:
        """Each part is done once; interrupted anywhere, this is called again and goes on from there."""
        session = self._leave()
        if session is None:
            self._say_uncaptured(error)
            return
        try:
            with session.ledger.closing():
                try:
                    session.close(error=error, discard=discard)
                finally:
                    self._stop_others_here(session, error, deadline_s, discard)
        except Exception as failure:
            guard.note("closing a capture", failure)
        self._finish(session, discard)

    def _stop_others_here(
        self, session: Session, error: str | None, deadline_s: float | None, discard: str | None
    ) -> None:
        left = self._closing_in is not None and not self._closing_in.is_running()  # in the middle of it
        if self._others is None or (self._told_to_stop and not left):
            return
        from stepscope.recording import loop

        stop = self._stop_others(self._others, session, error, deadline_s, discard)
        try:
            loop.run(stop, keep=True)  # a Ctrl-C must not leave them recording
        except Exception as failure:
            stop.close()
            guard.note("stopping workers and engines", failure)

    async def _close_async(self, error: str | None, discard: str | None = None) -> None:
        import asyncio

        session = self._leave()
        if session is None:
            return
        stopping: asyncio.Future[None] | None = None
        try:
            with session.ledger.closing():
                if self._others is not None:
                    stop = self._stop_others(self._others, session, error, None, discard)
                    stopping = asyncio.ensure_future(stop)
                    self._closing_in = stopping.get_loop()
                    await asyncio.sleep(0)  # the others are told before this process pays for its own stop
                    session.close(error=error, discard=discard)
                    await stopping
        except Exception as failure:
            guard.note("closing a capture", failure)
        except BaseException:
            if stopping is not None and not stopping.done():
                self._told_to_stop = False  # a Ctrl-C that ends the loop: it goes no further there
            raise
        finally:  # what nothing did: no others, or a loop shutting down
            self._closing_in = None
            self._close(error, None, discard)

    def _roll_back(self, error: BaseException) -> None:
        reason = f"opening failed: {describe(error)}"
        self._close(reason, None, reason)
        self._tell_asker(reason)

    def _tell_asker(self, reason: str | None) -> None:
        if self._asked_for:
            from stepscope.recording import requests

            requests.tell_outcome(self.step, reason)

    def _say_uncaptured(self, error: str | None) -> None:
        """How long a step took that was not selected, unless an exception cut it short."""
        began, self._uncaptured = self._uncaptured, None
        if began is not None and error is None:
            uncaptured.end(began, step=self.step, save_path=self.config.save_path, role=self._role)

    def _leave(self) -> Session | None:
        """Stops recording at once; None when there is nothing to close, or another thread is at it."""
        here = threading.get_ident()
        open_here = self._state in ("opening", "open") or (self._state == "closing" and self._closer == here)
        if self._session is None or not open_here:
            return None
        self._closer, self._state = here, "closing"
        deactivate(self._session)
        return self._session

    async def _stop_others(
        self,
        others: Others,
        session: Session,
        error: str | None,
        deadline_s: float | None,
        discard: str | None,
    ) -> None:
        from stepscope.recording.worker import StopRequest

        self._told_to_stop = True
        request = StopRequest(capture_id=session.capture_id, error=error, discard=discard)
        try:
            seconds = self.config.budget.fanout_seconds if deadline_s is None else deadline_s
            await others.stop(request, seconds)
        except BaseException as failure:
            if not isinstance(failure, Exception):
                self._told_to_stop = False  # their loop is shut down: who goes on closing tells them again
            raise
        if self._manifest_is_out:  # interrupted, the caller did not wait
            self._write_manifest(session)

    def _finish(self, session: Session, discard: str | None) -> None:
        """The last word in the manifest; then the process is free for the next capture."""
        global _open
        if self._state == "closed":  # by a signal's handler, on top of this
            self._write_manifest(session)
            return
        self._manifest_is_out = True
        is_kept = discard is None
        try:
            with session.ledger.closing():  # but for what follows the part's last write
                if discard is None:
                    self._say_unmatched_roles(session)
                else:
                    finish.withdraw(session, discard)
            self._write_manifest(session)  # what a disk refuses is noted: hooks are still owed theirs
            for line in self.result.problems():
                guard.warn("stepscope: step %d: %s", self.step, line)
            self._tell_asker(self.result.shortfall() if discard is None else discard)
            self._retain(session)
            if discard is None:
                uncaptured.captured(session)
        except Exception as failure:
            guard.note("ending a capture", failure)
            is_kept = False
        self._state, _open = "closed", None if _open is self else _open
        if is_kept:
            self._hand_over(session)

    def _write_manifest(self, session: Session) -> None:
        session.ledger.write()
        self.result.fold()

    def _hand_over(self, session: Session) -> None:
        """Says what was captured, and lets hooks and the command have it once the files are there."""
        try:
            guard.info("stepscope: %s", self.result.summary())
            finish.hand_over(self.result, session)
        except Exception as failure:
            guard.note("handing a capture over", failure)

    def _retain(self, session: Session) -> None:
        keep = self.config.budget.keep_steps
        if keep is not None and (self.config.finish.mirror is None or finish.mirrors(session)):
            from stepscope.recording.control import retain

            retain(
                RunLayout(self.config.save_path),
                session.run_id,
                keep,
                busy=finish.busy_steps(RunLayout(self.config.save_path)),
                may_go=partial(finish.is_mirrored, session),
            )

    def _say_unmatched_roles(self, session: Session) -> None:
        manifest, mine = self.result.manifest(), session.ledger
        alone = self._others is None
        if manifest is None or mine.part.absent or mine.state(untold.WORKERS) is not None:
            return  # who is not there may have the role
        if self.result.apart:
            return  # nor is it known yet what those do
        if alone and not identity.is_alone():
            return
        roles = {role for part in manifest.processes for role in (part.process.role, *part.roles)}
        if self._given[1] is not None:
            roles.add("rollout")
        for pattern, reason in untold.unmatched_roles(self.config.roles, roles, "in this capture").items():
            untold.warn_once(reason)
            mine.skip(f"roles.{pattern}", reason)

    # With and async with.

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(None if error is None else describe(error), None, None)

    async def __aenter__(self) -> Self:
        return await self.aopen() if self.selected else self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cancelled = await self._aclose(None if error is None else describe(error))
        if cancelled is not None and not isinstance(error, type(cancelled)):
            _go_on_cancelled(cancelled, instead=error is None)

    def _refuse_to_block_a_loop(self) -> None:
        if self._given == (None, None) or not in_event_loop():
            return
        raise CaptureError(
            "opening a capture with workers or engines would block the running event loop. "
            "Fix: `async with capture(step, ...)`, or `await` its aopen() and aclose()"
        )


def _go_on_cancelled(cancelled: asyncio.CancelledError, *, instead: bool) -> None:
    """Args: instead: nothing else goes up that this would replace."""
    if instead:
        raise cancelled
    from stepscope.recording import loop

    loop.cancel_later(cancelled)


def _after_fork_in_child() -> None:
    """The child is not recorded: the span file, the profiler and the capture are its parent's."""
    global _open
    runtime.active = None
    if _open is not None:
        # The child may leave the block too, by exit() say. It must not close its parent's files and engines.
        _open._state, _open._result = "closed", None
        _open = None
    loop = sys.modules.get("stepscope.recording.loop")
    if loop is not None:
        loop.forget()


def _after_fork_in_parent() -> None:
    session = runtime.active
    if session is not None:
        session.forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)
