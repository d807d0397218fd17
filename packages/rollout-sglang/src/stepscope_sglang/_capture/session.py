"""One capture of one engine, from the start of its profiler to the published files.

SGLang cannot cancel a start that waits for its forward pass: the recording would begin later and never end.
So if a start may be waiting, stepscope starts a short recording, which replaces the waiting start, and stops
the short recording at once.

Only the first pipeline rank answers a stop. The other ranks write after the answer, and die if their folder
is gone. So no folder is removed until the whole pipeline has written, and none after a stop that failed. The
next capture of this process, or the end of the process, publishes files that are written later.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from stepscope.engines.artifacts import read_anchor
from stepscope.errors import EngineError
from stepscope.files.manifest import LATE
from stepscope.files.sidecar import Artifact
from stepscope_sglang import _versions
from stepscope_sglang._capture import opening, outcome
from stepscope_sglang._capture.outcome import Recording
from stepscope_sglang._capture.publishing import publish_files, publish_late, publish_passes_of
from stepscope_sglang._driving.target import AlreadyRecordingError, EngineDiedError, RefusedError, Target
from stepscope_sglang._engine_side.passes import SCRAP
from stepscope_sglang._files.capture_folder import CaptureFolder, File, wait_until

log = logging.getLogger("stepscope")
_owed: deque[Session] = deque(maxlen=16)
"""Sessions whose files may still come, because their stops failed, or not all ranks of a pipeline wrote in
time. Writers: `owe` and `hand_in_late`, under `_entering`.
"""
_entering = threading.RLock()
_PATIENCE_S = (5.0, 30.0)
"""Longest wait for a complete file after SGLang has reported it: on a local disk, and on a shared disk."""
_PIPELINE_S = 300.0
"""Longest wait for the later ranks of a pipeline after the first rank's answer."""
_SCRAP: Mapping[str, object] = {"activities": ["CPU"], "with_stack": False, "record_shapes": False}
"""Options of the short recording that replaces a waiting start."""


class Session:
    """A capture of one engine. All methods run on one thread."""

    def __init__(self, target: Target, recording: Recording) -> None:
        """
        Args:
            recording: A recording planned by `opening.prepared`.
        """
        self.target = target
        self.recording = recording
        self.patience_s = _PATIENCE_S[target.remote]
        self.unstopped = False
        """True if the engine may still record for this session, because the stop failed, and no start was
        accepted since then."""
        self._unwanted = False
        """True if the capture was given up. Its files are then deleted."""
        self._left = False
        """True if a rank may still write. The folder is kept, because the rank would die without it."""

    # The start of the recording.

    def open(self) -> None:
        """Start the engine's profiler, which records from the next forward pass on.

        Raises:
            EngineError: stepscope or the engine refused the start, so nothing will be recorded.
        """
        recording = self.recording
        recording.folder.make(open_to_all=recording.remote)
        if recording.capture.passes:
            recording.folder.ask_passes(recording.capture.passes, alone=not recording.capture.profiler)
        try:
            self._start({**recording.plan.request, "output_dir": str(recording.folder.path)})
        except BaseException:
            recording.folder.remove()
            raise
        recording.opened = read_anchor()
        if recording.plan.start > 0:
            opening.note_late_start(recording, self.target)

    def _start(self, request: Mapping[str, object]) -> None:
        try:
            self.target.start(request)
        except AlreadyRecordingError as error:
            unstopped = [session for session in owed_by(self.target.engine) if session.unstopped]
            if not unstopped:
                by_stage = self.recording.plan.by_stage and self.recording.facts.disaggregation == "decode"
                raise EngineError(
                    f"{str(error).rstrip('.')}. If it is running, and not for us, somebody started it by "
                    "hand, or the process that did has died. Fix: call stop_profile on the engine"
                    + (", or engine.by_stage: false for this decode server" if by_stage else "")
                ) from error
            unstopped[-1]._stop_again(self.target)
            self.target.start(request)
        for session in owed_by(self.target.engine):
            session.unstopped = False

    def _stop_again(self, target: Target) -> None:
        """Repeat a stop that failed, because the engine still records for this session.

        Args:
            target: The target of the session that starts now.
        """
        recording = self.recording
        try:
            target.stop()
        except EngineError as error:
            raise EngineError(
                f"this engine's profiler still runs for step {recording.capture.step}: {recording.failure}; "
                f"and again: {error}. Fix: call stop_profile on the engine"
            ) from error
        wait_until(lambda: bool(recording.files()), self.patience_s)
        hand_in_late()

    # The end of the recording.

    def expire(self, reason: str) -> None:
        """End the recording before the end of the capture, unless it has ended."""
        recording = self.recording
        if recording.state == "armed":
            recording.expired = reason
            try:
                self.end()
            except EngineError as error:
                self._fail(error)

    def end(self) -> None:
        """Stop the engine's recording, and make sure that no start keeps waiting in the engine."""
        recording = self.recording
        if recording.state != "armed":
            return
        if not recording.capture.profiler:
            recording.state, self._left = "unused", False  # no profile has begun or waits
            return
        recording.state = "stopped"  # set before anything raises, because there must be no second stop
        if recording.is_bounded and outcome.has_stopped_by_itself(recording):
            recording.state = outcome.state_before_stop(recording)
            return
        self._left = True  # set before the stop, because the engine may write even if the stop raises
        try:
            self.target.stop()
        except RefusedError:
            recording.state = outcome.state_before_stop(recording)
        except EngineDiedError:
            self._left = False
            raise
        self._left = recording.facts.pp > 1  # True until all pipeline ranks have written
        recording.closed = read_anchor()
        if not outcome.has_stopped_by_itself(recording):
            self._disarm()

    def close(self) -> list[Artifact]:
        """Stop the recording, and return its artifacts. If the stop fails, return only complete artifacts.

        Raises:
            EngineError: nothing was recorded. The message has the reason.
        """
        recording = self.recording
        try:
            try:
                self.end()
                if recording.failure is None:
                    self._wait()
                    recording.folder.end_passes()
                    self._ask_schedulers()
            except EngineError as error:
                self._fail(error)
            passes = publish_passes_of(recording)
            return [*publish_files(recording, complete_only=self._left), *passes]
        finally:
            self._remove_folder()
            if self._left:
                why = recording.failure or f"not all ranks had written within {_PIPELINE_S:g} s"
                name = recording.folder.path.name
                recording.ignored[LATE] = f"{why}. {name} is left for a scheduler that writes later"
                owe(self)

    def drop(self) -> None:
        """End the recording and delete its files.

        Raises:
            EngineError: the stop failed. The session is then kept, so that late files are deleted too.
        """
        self._unwanted = True
        try:
            self.end()
            if self.recording.failure is not None:  # the stop by `expire` failed
                raise EngineError(self.recording.failure)
            self._wait()
        except EngineError as error:
            if self.recording.failure is None:
                self._fail(error)
            raise
        finally:
            self._remove_folder()
            if self._left:
                owe(self)

    def hand_in(self) -> bool:
        """Publish files that were written after `close`, or delete them after `drop`. Return whether more may
        come.
        """
        recording = self.recording
        self._left = publish_late(recording, wanted=not self._unwanted)
        if not self._left:
            recording.folder.remove()
        return self._left

    def _fail(self, error: EngineError) -> None:
        recording = self.recording
        recording.expired = recording.failure = f"the stop failed: {error}"
        self.unstopped = True

    def _disarm(self) -> None:
        """Replace a start that may still wait in the engine by a short recording, and stop the short
        recording.
        """
        recording = self.recording
        if outcome.is_disarmed(recording):
            return
        folder = recording.folder.path
        scrap = CaptureFolder(folder.with_name(f"{folder.name}{SCRAP}"))
        used = False  # True while a scheduler may write to `scrap`; the scheduler would die without it
        try:
            scrap.make(open_to_all=self.target.remote)
            used = True
            self.target.start({"output_dir": str(scrap.path), **_SCRAP})
            self.target.stop()
            used = False
            self._await_pipeline(scrap, scrap.files)
        except (EngineError, OSError) as error:
            used = used and not isinstance(error, RefusedError)
            recording.ignored["stop"] = f"what is left armed in the engine could not be cleared: {error}"
        finally:
            if not used and not self._left:
                scrap.remove()

    def _wait(self) -> None:
        """Wait until the files are complete, for at most `patience_s`, because a shared disk may lag."""
        recording = self.recording
        if recording.state == "unused" and not recording.files():  # no pass has started a late recording
            self._left = False
            return
        wait_until(
            lambda: bool(files := recording.files()) and recording.folder.traces_are_complete(files),
            self.patience_s,
        )
        self._await_pipeline(recording.folder, recording.files)

    def _await_pipeline(self, folder: CaptureFolder, files: Callable[[], list[File]]) -> None:
        """Wait for the files of all pipeline ranks, because only the first rank answers the stop."""
        pp = self.recording.facts.pp
        if pp > 1:
            self._left = not wait_until(lambda: folder.are_of_all_ranks(files(), pp), _PIPELINE_S)

    def _ask_schedulers(self) -> None:
        """Ask the schedulers for their times and counts, which only the plugin shows."""
        recording = self.recording
        if not _versions.older(recording.facts.version, _versions.PLUGINS_SINCE):
            with suppress(Exception):  # any library may raise; without states, only the files are used
                recording.states = self.target.states(self.patience_s)

    def _remove_folder(self) -> None:
        if not self._left:
            self.recording.folder.remove()


def owe(session: Session) -> None:
    """Keep a session until its files are published by the next capture or at the end of this process."""
    with _entering:
        if not _owed:
            atexit.unregister(hand_in_late)
            atexit.register(hand_in_late)
        _owed.append(session)


def owed_by(engine: object) -> list[Session]:
    """Return the kept sessions of an engine, in the order in which they ended."""
    return [session for session in tuple(_owed) if session.target.engine == engine]


def hand_in_late() -> None:
    """Publish files that were written after the end of their captures. An error of one session does not keep
    the other sessions from being published.
    """
    with _entering:
        for session in tuple(_owed):
            try:
                if not session.hand_in():
                    _owed.remove(session)
            except Exception as error:  # the next capture tries again
                step = session.recording.capture.step
                log.warning("stepscope: could not publish late files of step %d: %s", step, error)
