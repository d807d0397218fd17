"""Flight recorders of the workers, started by the process that bounds steps."""

from __future__ import annotations

from stepscope.errors import StepscopeError
from stepscope.recording.capture import omissions
from stepscope.recording.capture.readiness import STARTING_S
from stepscope.recording.fanout.fleet import WorkerOutcome, load_fleet
from stepscope.recording.fanout.messages import PrepareRequest
from stepscope.recording.process import failures, private_loop
from stepscope.recording.recorder.recorder import Recorder


def tell_workers(recorder: Recorder, workers: object) -> None:
    """Start a recorder in each worker. Waits for their answers; trouble is logged."""
    if omissions.none_meant(workers):
        return
    request = PrepareRequest(config=recorder.config, run_id=recorder.run_id, record_only=True)
    try:
        enter(recorder, private_loop.run(load_fleet(workers).prepare(request, STARTING_S)))
    except StepscopeError as error:
        failures.warn("stepscope: the flight recorder records no workers: %s", error)
    except Exception as error:
        failures.note("starting the flight recorder of the workers", error)


def enter(recorder: Recorder, outcomes: list[WorkerOutcome]) -> None:
    """Note which workers record."""
    for outcome in outcomes:
        if outcome.state != "ok":
            failures.warn("stepscope: the flight recorder misses %s: %s", outcome.name, outcome.reason)
        elif outcome.process is not None:
            recorder.workers[outcome.process] = outcome.name
