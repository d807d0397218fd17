"""capture(step): records one step in this process, its workers and its engines, and closes on every path.

Life of a capture: new -> opening -> open -> closing -> closed; opening
that fails or is cancelled is rolled back. For a step that is not selected, all of it is a no-op.

One file above 400 lines: it holds all states of a capture and who may change them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from stepscope import switch
from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError, CaptureOpenError, ConfigError, StepscopeError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.records import Ending, Manifest, OpenedBy
from stepscope.recording.after import pipeline
from stepscope.recording.capture import baseline, configure, omissions, retention
from stepscope.recording.capture.result import CaptureResult
from stepscope.recording.process import failures, identity, run
from stepscope.recording.process.event_loop import in_event_loop
from stepscope.recording.process.failures import describe
from stepscope.recording.process.identity import identify
from stepscope.recording.session import activation, claims
from stepscope.recording.session.claims import Claim
from stepscope.recording.session.session import Session

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from stepscope.recording.fanout.arguments import Engines, Workers
    from stepscope.recording.fanout.participants import Others
    from stepscope.recording.output.manifest_part import Ledger

# What needs asyncio or a cluster library is imported where it is used: `import stepscope` is kept light.

_wanted: Callable[[ProfileConfig, int, str, int | None, bool], ProfileConfig | None] | None = None
"""`requests.wanted` once a configuration listens: to import it anew would cost a step as much as to ask it.
One writer: `_asked_for`.
"""
_is_torch_explained = False
"""Whether this process has explained the lines that torch prints. One writer: `Capture._about_torch`."""


def opened() -> Capture | None:
    """The capture of this process that is opening, open or closing."""
    holder = claims.holder()
    return holder if isinstance(holder, Capture) else None


def capture(
    step: int,
    *,
    workers: Workers | None = None,
    engines: Engines | None = None,
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

    With STEPSCOPE_DISABLE=1 it raises nothing, and records nothing.
    """
    if switch.DISABLED:
        return Capture(step, None, None, ProfileConfig(), role, rank)
    began_ns = time.monotonic_ns()
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(
            "capture(step)", step, "an integer, 0 or more", "pass the training loop's global step"
        )
    if step < 0:
        raise ConfigError("capture(step)", step, "0 or more", "pass the training loop's global step")
    made = Capture(step, workers, engines, configure.current() if config is None else config, role, rank)
    made.spent_ns = time.monotonic_ns() - began_ns
    return made


def capture_unedited(step: int, *, workers: object, role: str) -> Capture:
    """As `capture`, for an `instrument` entry in a program that nobody edits."""
    made = capture(step, workers=cast("Workers", workers), role=role)  # checked when it opens
    made._opened_by = "instrument"
    return made


def _asked_for(
    config: ProfileConfig, step: int, role: str, rank: int | None, *, alone: bool
) -> ProfileConfig | None:
    """The configuration with which somebody asked for this step on demand; None when nobody did."""
    global _wanted
    if switch.DISABLED or not config.control.requests:
        return None
    if _wanted is None:
        from stepscope.recording.capture.on_demand import wanted

        _wanted = wanted
    try:
        return _wanted(config, step, role, rank, alone)
    except Exception as error:
        failures.note("looking for requests", error)
        return None


class Capture:
    """The recording of one step. Made by `capture`; `result` says what became of it."""

    def __init__(
        self, step: int, workers: object, engines: object, config: ProfileConfig, role: str, rank: int | None
    ) -> None:
        self.step = step
        if config.cuda_memory.oom_any_step != "off":
            from stepscope.recording.session import oom

            oom.watch(config, identify(role, rank=rank), run.run_id(), step)
        self.spent_ns = 0
        """Time that making it took."""
        self._opened_by: OpenedBy = "program"
        self._told = workers is not None
        if workers is not None and omissions.none_meant(workers):
            workers = None
        asked = _asked_for(config, step, role, rank, alone=workers is not None or engines is not None)
        self.config = config if asked is None else asked
        self._asked_for = asked is not None
        self.selected = self.config.selects(step)
        if config.instrument:
            from stepscope.recording.instrument import no_step

            no_step.reached(config, step, self.selected)
        self._result: CaptureResult | None = None
        self._state: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self._given = (workers, engines)
        self._role = role
        self._rank = rank
        self._session: Session | None = None
        self._others: Others | None = None
        self._claim: Claim | None = None
        """With which this has, or had, the process."""
        self._told_to_stop = False
        """Whether the others are being stopped, or were."""
        self._closer: int | None = None
        """The thread that closes this. What interrupts it there (a signal) may close in its place."""
        self._closing_in: asyncio.AbstractEventLoop | None = None
        """The loop in which a task is closing this."""
        self._manifest_is_out = False
        """Whether it is being written, or was: what is said later has to be written again."""
        self._uncaptured: baseline.Began | None = None
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
            self._uncaptured = baseline.begin()
            return self
        began_ns = time.monotonic_ns() - self.spent_ns
        self._refuse_to_block_a_loop()
        claim = Claim(self.step, self)
        try:
            session = self._take_process(claim, began_ns)
            if session is None:
                return self
            session.open_files()
            if self._others is not None:
                from stepscope.recording.process import private_loop

                private_loop.run(self._start_others(self._others, session))
            self._begin(session)
            self._settle(session)
        except BaseException as error:
            if self._claim is not claim:  # refused, or interrupted before there was anything to undo
                claim.free()
                raise
            self._roll_back(error)
            if self._is_for_the_user(error):
                raise
            failures.note("opening a capture", error)
        return self

    async def aopen(self) -> Self:
        """As `open`, without blocking the event loop. Cancelled, it rolls back first."""
        if not self.selected:
            self._uncaptured = baseline.begin()
            return self
        began_ns = time.monotonic_ns() - self.spent_ns
        from stepscope.engines.own_thread import own_thread
        from stepscope.recording.process import private_loop

        claim = Claim(self.step, self)
        try:
            session = self._take_process(claim, began_ns)
            if session is None:
                return self
            await own_thread(session.open_files)
            if self._others is not None:
                await self._start_others(self._others, session)
            self._begin(session)
            self._settle(session)
        except BaseException as error:
            if self._claim is not claim:
                claim.free()
                raise
            reason = f"opening failed: {describe(error)}"
            self._leave_step()
            cancelled = await private_loop.uninterrupted(
                self._close_async(Ending("rollback", reason), reason)
            )
            self._hand_back()
            self._settle(self._session)
            self._tell_asker(reason)
            if self._is_for_the_user(error):
                raise
            failures.note("opening a capture", error)
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

    def _take_process(self, claim: Claim, began_ns: int) -> Session | None:
        """Claims this process for this capture, or refuses. Raises before anything is written or started.

        Returns:
            The session to open; None if a signal's handler closed the capture meanwhile.
        """
        if self._state != "new":
            raise CaptureError(
                f"this capture of step {self.step} is {self._state}; make a new one with capture()"
            )
        other = claim.take()
        if other is not None:
            raise CaptureOpenError(self._refusal(other))
        self._claim, self._state = claim, "opening"
        workers, engines = self._given
        if workers is not None or engines is not None:
            from stepscope.recording.fanout.participants import Others

            self._others = Others(workers, engines)
        fleet = None if self._others is None else self._others.fleet
        configure.check(self.config, on_ray=fleet is not None)
        if self.config.instrument:
            configure.instrument(self.config)
        session = Session(
            config=self.config,
            step=self.step,
            process=identify(self._role, rank=self._rank),
            roles=(self._role,),
            run_id=run.run_id(),
            capture_id=os.urandom(8).hex(),
            owner=True,
            began_ns=began_ns,
            opened_by=self._opened_by,
            on_artifact=pipeline.artifact_done,
        )
        if self._others is not None:
            self._others.join(session)
        self._say_missing_workers(session)
        result, self._result = (
            self._result,
            CaptureResult(step=self.step, session=session, others=self._others),
        )
        self._session = session
        if not self._is_opening() and not session.ended:  # closed before there was a session
            self._session, self._result = None, result
            self._free()
            return None
        return session

    def _is_opening(self) -> bool:
        return self._state == "opening"

    def _refusal(self, other: Claim) -> str:
        if isinstance(other.taker, Capture):
            return (
                f"a capture of step {other.step} is {other.taker._state} in this process, and profilers are "
                f"process-wide. Fix: close it before opening step {self.step}"
            )
        return (
            f"this process is recorded as a worker in a capture of step {other.step}. "
            "Fix: open captures in one place, the driver"
        )

    def _say_missing_workers(self, session: Session) -> None:
        reason = (
            None
            if self._told
            else omissions.missing_workers(engines=self._given[1] is not None, opened_by=self._opened_by)
        )
        if reason is not None:
            failures.warn_once(reason)
            say = session.ledger.lack if omissions.were_prepared() else session.ledger.skip
            say(omissions.WORKERS, reason, kind="selection")

    async def _start_others(self, others: Others, session: Session) -> None:
        from stepscope.recording.fanout.messages import StartRequest

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
            part = session.ledger.part
            ending = None if part.ended_by is None else Ending(part.ended_by, part.error or "")
            await self._stop_others(others, session, ending, None, None)
            return
        if self._asked_for:
            from stepscope.recording.capture import on_demand

            on_demand.tell_others(self.step, others.taking_part())

    def _begin(self, session: Session) -> None:
        """The last part of opening, on the thread whose work is recorded."""
        if self._state != "opening":
            return
        run.record(self.config)
        pipeline.promise(session, alone=self._others is None)
        session.start_profiler()
        activation.activate(session)
        if self._state == "opening":
            self._state = "open"

    def _settle(self, session: Session | None) -> None:
        """Ends what was opened since this was closed: by a signal's handler, or another thread."""
        if session is None:
            self._free()
            self._state = "new"  # nothing was begun: it may be opened once more
        elif self._state == "closed":
            session.settle()
            self._write_manifest(session)

    # Closing.

    def close(self, error: str | None = None, deadline_s: float | None = None) -> None:
        """Closes the capture. Idempotent; what a task is closing is left to it. Trouble of our own goes to
        the manifest and is not raised.

        Args:
            error: Why it ended, if not normally.
            deadline_s: For each worker and engine, instead of `budget.fanout_seconds`.
        """
        if self._closing_in is None or not self._closing_in.is_running():
            self._close_here(_raised(error), deadline_s, None)

    async def aclose(self, error: str | None = None) -> None:
        """As `close`, without blocking the event loop. Being cancelled meanwhile does not interrupt it: that
        is raised afterwards; with an `error`, which goes up, at the task's next await.
        """
        cancelled = await self._aclose(_raised(error))
        if cancelled is not None:
            _go_on_cancelled(cancelled, instead=error is None)

    async def _aclose(self, ending: Ending | None) -> asyncio.CancelledError | None:
        """The cancellation that came meanwhile."""
        if self._state not in ("opening", "open"):
            self._say_uncaptured(ending)
            return None
        self._leave_step()
        from stepscope.recording.process import private_loop

        try:
            return await private_loop.uninterrupted(self._close_async(ending))
        finally:
            self._hand_back()

    def _leave_step(self) -> None:
        """Reads the clock at which the step ends, before all else that closing does."""
        if self._session is not None and self._state in ("opening", "open"):
            self._session.leave()

    def _hand_back(self) -> None:
        """Reads the clock at which closing ends, after all else that it does."""
        if self._session is not None and self._state == "closed":
            self._session.hand_back()

    def _close_here(self, ending: Ending | None, deadline_s: float | None, discard: str | None) -> None:
        self._leave_step()
        try:
            self._close(ending, deadline_s, discard)
        finally:
            self._hand_back()

    def _close(self, ending: Ending | None, deadline_s: float | None, discard: str | None) -> None:
        try:
            self._close_what_is_open(ending, deadline_s, discard)
        except BaseException:  # a Ctrl-C: what it cut short is done now
            try:
                self._close_what_is_open(ending, deadline_s, discard)
            finally:  # after a second one, with what is known
                if self._state == "closing" and self._session is not None:
                    self._finish(self._session, discard)
            raise

    def _close_what_is_open(
        self, ending: Ending | None, deadline_s: float | None, discard: str | None = None
    ) -> None:
        """Each part is done once; interrupted anywhere, this is called again and goes on from there."""
        session = self._leave()
        if session is None:
            self._say_uncaptured(ending)
            return
        try:
            try:
                session.close(ending=ending, discard=discard)
            finally:
                self._stop_others_here(session, ending, deadline_s, discard)
        except Exception as failure:
            failures.note("closing a capture", failure)
        self._finish(session, discard)

    def _stop_others_here(
        self, session: Session, ending: Ending | None, deadline_s: float | None, discard: str | None
    ) -> None:
        left = self._closing_in is not None and not self._closing_in.is_running()  # in the middle of it
        if self._others is None or (self._told_to_stop and not left):
            return
        from stepscope.recording.process import private_loop

        stop = self._stop_others(self._others, session, ending, deadline_s, discard)
        try:
            private_loop.run(stop, keep=True)  # a Ctrl-C must not leave them recording
        except Exception as failure:
            stop.close()
            failures.note("stopping workers and engines", failure)

    async def _close_async(self, ending: Ending | None, discard: str | None = None) -> None:
        import asyncio

        session = self._leave()
        if session is None:
            return
        stopping: asyncio.Future[None] | None = None
        try:
            if self._others is not None:
                stop = self._stop_others(self._others, session, ending, None, discard)
                stopping = asyncio.ensure_future(stop)
                self._closing_in = stopping.get_loop()
                await asyncio.sleep(0)  # the others are told before this process pays for its own stop
                session.close(ending=ending, discard=discard)
                await stopping
        except Exception as failure:
            failures.note("closing a capture", failure)
        except BaseException:
            if stopping is not None and not stopping.done():
                self._told_to_stop = False  # a Ctrl-C that ends the loop: it goes no further there
            raise
        finally:  # what nothing did: no others, or a loop shutting down
            self._closing_in = None
            self._close(ending, None, discard)

    def _roll_back(self, error: BaseException) -> None:
        reason = f"opening failed: {describe(error)}"
        self._close_here(Ending("rollback", reason), None, reason)
        self._settle(self._session)
        self._tell_asker(reason)

    def _tell_asker(self, reason: str | None) -> None:
        if self._asked_for:
            from stepscope.recording.capture import on_demand

            on_demand.tell_outcome(self.step, reason)

    def _say_uncaptured(self, ending: Ending | None) -> None:
        """How long a step took that was not selected, unless an exception cut it short."""
        began, self._uncaptured = self._uncaptured, None
        if began is not None and ending is None:
            baseline.end(began, step=self.step, save_path=self.config.save_path, role=self._role)

    def _leave(self) -> Session | None:
        """Stops recording at once; None when there is nothing to close, or another thread is at it."""
        here = threading.get_ident()
        open_here = self._state in ("opening", "open") or (self._state == "closing" and self._closer == here)
        if self._session is None or not open_here:
            if self._state == "opening":
                self._state = "closed"  # who opens it sees that
            return None
        self._closer, self._state = here, "closing"
        activation.deactivate(self._session)
        return self._session

    async def _stop_others(
        self,
        others: Others,
        session: Session,
        ending: Ending | None,
        deadline_s: float | None,
        discard: str | None,
    ) -> None:
        from stepscope.recording.fanout.messages import StopRequest

        self._told_to_stop = True
        request = StopRequest(capture_id=session.capture_id, ending=ending, discard=discard)
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
        if self._state == "closed":  # by a signal's handler, on top of this
            self._write_manifest(session)
            return
        self._manifest_is_out = True
        is_kept = discard is None
        try:
            if discard is None:
                self._say_omissions(session)
            else:
                pipeline.withdraw(session, discard)
            self._write_manifest(session)  # what a disk refuses is noted: hooks are still owed theirs
            session.ledger.told = True
            for line in self.result.problems_to_tell():
                failures.warn("stepscope: step %d: %s", self.step, line)
            self._tell_asker(self.result.shortfall() if discard is None else discard)
            self._retain(session)
            if discard is None:
                baseline.captured(session)
        except Exception as failure:
            failures.note("ending a capture", failure)
            is_kept = False
        self._free()  # first: interrupted here, this is done once more
        self._state = "closed"
        session.write_cost()  # before the chores, which read it
        if is_kept:
            self._hand_over(session)

    def _free(self) -> None:
        if self._claim is not None:
            self._claim.free()

    def _write_manifest(self, session: Session) -> None:
        session.ledger.write()
        self.result.fold()

    def _hand_over(self, session: Session) -> None:
        """Says what was captured, and lets hooks and the command have it once the files are there."""
        try:
            summary = self.result.summary_to_tell()
            if summary is not None:
                failures.tell("stepscope: %s%s", summary, self._about_torch())
            pipeline.hand_over(self.result, session)
        except Exception as failure:
            failures.note("handing a capture over", failure)

    def _about_torch(self) -> str:
        """Words about the lines that torch's profiler has just printed; none after the first time."""
        global _is_torch_explained
        torch_window = sys.modules.get("stepscope.backends.torch.window")
        if _is_torch_explained or torch_window is None or not torch_window.kineto_has_started:
            return ""
        _is_torch_explained = True
        return ". Lines with `USDT:` or `External init callback` are torch's own and harmless"

    def _retain(self, session: Session) -> None:
        keep = self.config.budget.keep_steps
        if keep is not None and (self.config.finish.mirror is None or pipeline.mirrors(session)):
            retention.retain(
                RunLayout(self.config.save_path),
                session.run_id,
                keep,
                busy=pipeline.busy_steps(RunLayout(self.config.save_path)),
                may_go=partial(pipeline.is_mirrored, session),
            )

    def _say_omissions(self, session: Session) -> None:
        """Enters what was asked for and did not take part."""
        manifest, mine = self.result.manifest(), session.ledger
        if manifest is None:
            return
        is_whole = self._knows_all(manifest)
        if not self._told or self._others is not None:
            self._say_left_out(mine, manifest)
        if not is_whole or mine.part.absent or mine.state(omissions.WORKERS) is not None:
            return  # who is not there may have the role
        roles = {role for part in manifest.processes for role in (part.process.role, *part.roles)}
        if self._given[1] is not None:
            roles.add("rollout")
        unmatched = omissions.unmatched_roles(self.config.roles, roles, "in this capture")
        for pattern, reason in unmatched.items():
            failures.warn_once(reason)
            mine.lack(f"roles.{pattern}", reason, kind="selection")
        why_none = None if unmatched else omissions.no_profiler(self.config, manifest)
        if why_none is not None:
            failures.warn_once(why_none)
            say = mine.skip if self.config.roles == ProfileConfig().roles else mine.lack
            say(omissions.PROFILER, why_none, kind="selection")

    def _say_left_out(self, ledger: Ledger, manifest: Manifest) -> None:
        if ledger.part.ended_by is not None:
            return  # there may be no time to ask
        actors = {part.process.actor_id for part in manifest.processes if part.process.actor_id is not None}
        for name, count in omissions.left_out(actors).items():
            reason = (
                f"{count} actor{'s' * (count != 1)} of this job, and none in workers: calls of its decorated "
                "methods are not recorded. Fix: add them to capture(workers={role: handles})"
            )
            failures.warn_once(f"{name}: {reason}")
            # Who names workers or engines may mean no others.
            say = ledger.lack if self._others is None else ledger.skip
            say(f"actors of {name}", reason, kind="selection")

    def _knows_all(self, manifest: Manifest) -> bool:
        """Whether the parts of all that take part are here: of the ranks of torchrun, the last one to close
        has them.
        """
        if self.result.apart:
            return False
        if self._others is not None or identity.is_alone():
            return True
        ranks = {part.process.key for part in manifest.processes if part.owner}
        return len(ranks) == identity.ranks() and not self.result.is_open_elsewhere(manifest)

    def end(self, ending: Ending, deadline_s: float) -> None:
        """See `claims.Taker`."""
        self._close_here(ending, deadline_s, None)

    def disown(self) -> None:
        """See `claims.Taker`. The child may leave the block too, by `exit()` say, and must close nothing."""
        self._state, self._result = "closed", None

    # With and async with.

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_step()
        self._close_here(_ending_of(error), None, None)

    async def __aenter__(self) -> Self:
        return await self.aopen() if self.selected else self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_step()
        cancelled = await self._aclose(_ending_of(error))
        if cancelled is not None and not isinstance(error, type(cancelled)):
            _go_on_cancelled(cancelled, instead=error is None)

    def _refuse_to_block_a_loop(self) -> None:
        if self._given == (None, None) or not in_event_loop():
            return
        raise CaptureError(
            "opening a capture with workers or engines would block the running event loop. "
            "Fix: `async with capture(step, ...)`, or `await` its aopen() and aclose()"
        )


def _raised(error: str | None) -> Ending | None:
    return None if error is None else Ending("exception", error)


def _ending_of(error: BaseException | None) -> Ending | None:
    return _raised(None if error is None else describe(error))


def _go_on_cancelled(cancelled: asyncio.CancelledError, *, instead: bool) -> None:
    """Args: instead: nothing else goes up that this would replace."""
    if instead:
        raise cancelled
    from stepscope.recording.process import private_loop

    private_loop.cancel_later(cancelled)
