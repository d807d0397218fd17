"""The flight recorder in the process that runs the training loop: steps that are not captured."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from socket import gethostname

from stepscope._recording.capture.asked import Asked
from stepscope._recording.capture.readiness import STARTING_S
from stepscope._recording.fanout.messages import PrepareRequest, WorkerOutcome
from stepscope._recording.fanout.participants import Participants, profilers_of
from stepscope._recording.process import failures, identity, private_loop
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import identify, is_alone
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.recorder import Recorder
from stepscope._recording.recorder.steps import RecordedStep
from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler
from stepscope.errors import StepscopeError, ours
from stepscope.files.clock import ClockOffset
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending
from stepscope.files.requests import Request, change_requests

MEASURING_S = 1.0
"""Longest wait for workers whose clocks are measured again before a step is written."""
_EXPIRES_NS = 3600 * 10**9
"""Lifetime of a request to capture the steps after a slow step."""


def begin(asked: Asked) -> Callable[[object], None] | None:
    """Begin a step in the flight recorder.

    Returns:
        A function that ends the step, or None if the recorder could not be started (the error is logged).
            Call the function with the exception that ended the step, with a description of the exception, or
            with None.
    """
    recorder = standing.standing()
    if recorder is None or recorder.config is not asked.config:
        recorder = _start(asked)
    if recorder is None:
        return None
    if not recorder.is_told_of and (asked.workers is not None or asked.engines is not None):
        recorder.is_told_of = True
        _in_background(partial(_tell, recorder, asked.workers, asked.engines))
    return partial(_end, recorder, recorder.begin_step(asked.step))


def _end(recorder: Recorder, step: RecordedStep, error: object) -> None:
    # In a forked child, the inherited recorder has no threads, and its locks may be held for ever.
    if recorder is not standing.standing():
        return
    trigger = recorder.end_step(step, _ending(error), failed=isinstance(error, (Exception, str)))
    if trigger == "slow" and recorder.config.recorder.then_capture:
        _in_background(partial(_capture_next, recorder.config, step.number))


def stand(asked: Asked) -> None:
    """Start the recorder before a captured step, so that even the first step of the run gets a line."""
    if standing.standing() is None:
        _start(asked)


def _start(asked: Asked) -> Recorder | None:
    """Start the recorder of this process and return it, or log the error and return None."""
    try:
        process = identify(asked.role, rank=asked.rank)
        recorder = standing.start(asked.config, process, identity.run_id(), owner=True)
    except ours() as error:
        failures.note("starting the flight recorder", error)
        return None
    recorder.config = asked.config
    if asked.config.names_folder:
        recorder.later(partial(identity.record_run, asked.config))
    return recorder


def _tell(recorder: Recorder, workers: object, engines: object) -> None:
    """Start the recorder in each worker, note which workers have started it, and sample the engines'
    counters.
    """
    request = PrepareRequest(config=recorder.config, run_id=recorder.run_id, record_only=True)
    try:
        others = Participants(workers, _profilers(engines))
        if recorder.engines is not None:
            for profiler in others.profilers:
                recorder.engines.add(profiler)
        fleet = others.fleet
        if fleet is None:
            return
        outcomes = private_loop.run(fleet.prepare(request, STARTING_S))
    except StepscopeError as error:
        failures.warn("stepscope: the flight recorder records no workers: %s", error)
        return
    except ours() as error:
        failures.note("starting the flight recorder of workers and engines", error)
        return
    for outcome in outcomes:
        if outcome.state != "ok":
            failures.warn("stepscope: the flight recorder misses %s: %s", outcome.name, outcome.reason)
        elif outcome.process is not None:
            recorder.workers[outcome.process] = outcome.name
    here = f"_{gethostname()}_pid"
    recorder.clocks += [clock for clock in _clocks(outcomes) if here not in clock.process]

    def measure() -> Sequence[ClockOffset]:
        """Measure the workers' clocks again. If a busy worker does not answer in time, its earlier
        measurement is used.
        """
        try:
            return _clocks(private_loop.run(fleet.prepare(request, MEASURING_S)))
        except ours() as error:
            failures.note("comparing clocks for the flight recorder", error)
            return []

    recorder.measure = measure


def _profilers(engines: object) -> list[EngineProfiler] | None:
    """Return the profilers of the engines, or None if there are no engines. An engine that is not supported
    is logged, and also gives None.
    """
    try:
        return None if engines is None else profilers_of(engines)
    except ours() as error:
        failures.warn("stepscope: the flight recorder samples no engines: %s", describe(error))
        return None


def _clocks(outcomes: Sequence[WorkerOutcome]) -> list[ClockOffset]:
    return [outcome.clock for outcome in outcomes if outcome.clock is not None]


def _capture_next(config: ProfileConfig, step: int) -> None:
    """Request captures with the profilers for the steps after a slow step."""
    if not config.control.requests:
        failures.warn_once("recorder.then_capture does nothing: control.requests is false")
        return
    steps = "next"
    if config.recorder.then_capture > 1:
        first = step + (1 if is_alone() else 2)
        steps = f"{first}:{first + config.recorder.then_capture}"
    now_ns = time.time_ns()
    request = Request(
        id=os.urandom(4).hex(),
        steps=steps,
        because=f"step {step} was slow",
        created_ns=now_ns,
        expires_ns=now_ns + _EXPIRES_NS,
        runs=[identity.run_id()],
    )
    try:
        change_requests(RunLayout(config.save_path), lambda standing: [*standing, request])
    except ours(OSError) as error:
        failures.warn("stepscope: the step after the slow one is not captured: %s", error)


def _ending(error: object) -> Ending | None:
    if error is None:
        return None
    return Ending("exception", describe(error) if isinstance(error, BaseException) else str(error))


def _in_background(work: Callable[[], None]) -> None:
    try:
        threading.Thread(target=work, name="stepscope-recorder-once", daemon=True).start()
    except ours(RuntimeError):  # the interpreter is exiting
        pass
