"""Steps that no capture records: their durations, and the flight recorder if it is on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepscope import switch
from stepscope.config import ProfileConfig
from stepscope.errors import StepscopeError
from stepscope.files.manifest.records import Ending
from stepscope.recording.capture import baseline
from stepscope.recording.process import failures, run
from stepscope.recording.process.failures import describe
from stepscope.recording.process.identity import identify, is_alone
from stepscope.recording.recorder import standing
from stepscope.recording.recorder.recorder import Recorder
from stepscope.recording.recorder.steps import RecordedStep
from stepscope.recording.session.session import Session
from stepscope.recording.spans import slot


class UnselectedStep:
    """One step that is not captured, between its opening and its closing."""

    __slots__ = ("_began", "_recorded", "_recorder")

    def __init__(self, began: baseline.Began | None, recorder: Recorder | None, number: int) -> None:
        self._began = began
        self._recorder = recorder
        self._recorded: RecordedStep | None = None if recorder is None else recorder.begin_step(number)

    def end(self, error: object, *, step: int, config: ProfileConfig, role: str) -> None:
        """End it.

        Args:
            error: The exception that left it, or its description; None if none did.
        """
        if self._began is not None and error is None:
            baseline.end(self._began, step=step, save_path=config.save_path, role=role)
        recorder, recorded = self._recorder, self._recorded
        if recorder is None or recorded is None or recorded.closed is not None:
            return
        if recorder.end_step(recorded, _ending(error)) == "slow" and config.recorder.then_capture:
            _in_background(lambda: _capture_next(config, step))


def begin(
    number: int, *, config: ProfileConfig, role: str, rank: int | None, workers: object
) -> UnselectedStep | None:
    """Begin a step that is not captured. None: a capture records this process meanwhile."""
    if switch.DISABLED or slot.session() is not None:
        return None
    return UnselectedStep(baseline.begin(), recorder_of(config, role, rank, workers), number)


def captured(session: Session) -> None:
    """Note a captured step among the steps of the flight recorder."""
    recorder, part = standing.standing(), session.manifest_part.record
    if recorder is not None and part.closed is not None:
        recorder.captured(session.step, part.opened, part.closed, part.error)


def recorder_of(config: ProfileConfig, role: str, rank: int | None, workers: object) -> Recorder | None:
    """Return this process' flight recorder, which is started with the first step. None: it is off.

    The workers are told once, in the background.
    """
    if config.record == "off":
        return None
    recorder = standing.standing()
    if recorder is not None and recorder.config is config:
        return recorder
    try:
        before, recorder = recorder, standing.start(config, identify(role, rank=rank), run.run_id())
    except Exception as error:
        failures.note("starting the flight recorder", error)
        return None
    recorder.config = config
    if recorder is not before and workers is not None and not recorder.workers:
        _in_background(lambda: _tell(recorder, workers))
    return recorder


def _tell(recorder: Recorder, workers: object) -> None:
    from stepscope.recording.capture.recorder_workers import tell_workers  # import time: asyncio

    tell_workers(recorder, workers)


def _capture_next(config: ProfileConfig, step: int) -> None:
    """Ask for the profilers in the steps after a slow one."""
    from stepscope.recording.capture.requesting import request_capture  # import time: rarely needed

    if not config.control.requests:
        failures.warn_once("recorder.then_capture does nothing: control.requests is false")
        return
    steps = "next"
    if config.recorder.then_capture > 1:
        first = step + (1 if is_alone() else 2)
        steps = f"{first}:{first + config.recorder.then_capture}"
    try:
        request_capture(steps, save_path=config.save_path)
    except (StepscopeError, OSError) as error:
        failures.warn("stepscope: the step after the slow one is not captured: %s", error)


def _ending(error: object) -> Ending | None:
    if error is None or (isinstance(error, BaseException) and not isinstance(error, Exception)):
        return None  # a Ctrl-C is no failure of the step
    return Ending("exception", describe(error) if isinstance(error, Exception) else str(error))


def _in_background(work: Callable[[], None]) -> None:
    try:
        threading.Thread(target=work, name="stepscope-recorder-once", daemon=True).start()
    except RuntimeError:  # the interpreter is exiting
        pass
