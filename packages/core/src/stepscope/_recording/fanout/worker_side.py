"""The worker's side of a capture: functions that a fleet calls in the worker's process.

A worker has at most one session. A start is refused if the stop of its capture came first, as happens to a
worker that was busy until after the deadline. A stop does nothing if its capture is not open, and returns
False.
"""

from __future__ import annotations

import sys
import time
import weakref
from functools import partial

from stepscope._recording.fanout import fetch
from stepscope._recording.fanout.messages import (
    PrepareAnswer,
    PrepareRequest,
    StartAnswer,
    StartRequest,
    StopRequest,
    WorkerRequest,
)
from stepscope._recording.instrument import configured
from stepscope._recording.process import shutdown
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import identify
from stepscope._recording.recorder import standing
from stepscope._recording.session import activation, oom, pipeline
from stepscope._recording.session.activation import Claim
from stepscope._recording.session.selection import decide_process, library_loaded, may_record, missing_ranks
from stepscope._recording.session.session import Session
from stepscope._recording.spans import slot, wrapping
from stepscope.backends import load_backend
from stepscope.backends.undisturbed import undisturbed
from stepscope.engines import EngineProfiler, local_engines
from stepscope.errors import ours
from stepscope.files import switch
from stepscope.files.manifest import Ending
from stepscope.files.sidecar import ProcessInfo

_stopped: set[str] = set()
"""Ids of captures whose stop came before the end of their start. Writers: `stop_worker` adds, `start_worker`
removes."""
_OFF = f"{switch.VARIABLE} is set in this process"
_OVER = "the capture was over before it began here"


def start_worker(request: StartRequest, instance: object = None) -> StartAnswer:
    """Open the capture in this process, the worker. A refusal is returned; an error is raised."""
    began_ns = time.monotonic_ns()
    process, roles = _joined(request, instance)
    if switch.DISABLED:
        return StartAnswer(process=process, refused=_OFF, off=True)
    if request.capture_id in _stopped:
        _stopped.discard(request.capture_id)
        return StartAnswer(process=process, refused=_OVER)
    claim = Claim(request.step)
    try:
        other = claim.take()
        if other is not None:
            refused = f"a capture of step {other.step} is open in this process"
            return StartAnswer(process=process, refused=refused)
        answer = _start(request, process, roles, claim, began_ns)
        if instance is not None:
            _record(request, process)
        return answer
    except BaseException:
        claim.free()
        raise


def _start(
    request: StartRequest, process: ProcessInfo, roles: tuple[str, ...], claim: Claim, began_ns: int
) -> StartAnswer:
    session = Session(
        config=request.config,
        step=request.step,
        process=process,
        roles=roles,
        run_id=request.run_id,
        capture_id=request.capture_id,
        owner=False,
        spans_only=request.spans_only,
        began_ns=began_ns,
        on_artifact=pipeline.artifact_done,
    )
    try:
        activation.hand_to_worker(claim, session)
        oom.watch(request.config, process, request.run_id, request.step)
        apart = not session.layout.has_part(request.owner_part)
        if apart and request.config.finish.gather:
            fetch.keep(session)
        _sample_engines(session)
        session.open()
        undisturbed(partial(_begin, session))
    except BaseException as error:
        fetch.release(request.capture_id)
        reason = f"opening failed: {describe(error)}"
        session.finish(ending=Ending("rollback", reason), discard=reason)
        raise
    if request.capture_id in _stopped:  # stopped meanwhile by another thread
        _stopped.discard(request.capture_id)
        session.finish(discard=_OVER)
        return StartAnswer(process=process, refused=_OVER)
    return StartAnswer(process=process, apart=apart)


def _begin(session: Session) -> None:
    if not session.ended:  # a signal handler may have ended the session
        session.prepare_profiler()
        session.start_profiler()
        activation.activate(session)


def _sample_engines(session: Session) -> None:
    """Sample the counters of those engines of this process which the capture records, also of engines that
    begin later.
    """
    reference = weakref.ref(session)

    def join(profiler: EngineProfiler) -> None:
        opened = reference()
        if opened is not None:
            opened.sample_engine(profiler)

    local_engines.tell(join)


def stop_worker(request: StopRequest) -> bool:
    """Close the capture in this process, the worker.

    Returns:
        False if the capture was not open: the actor was restarted, or never got the start.
    """
    if request.discard is not None:
        fetch.release(request.capture_id)
    # Set first, so that a start that runs on another thread closes its capture.
    _stopped.add(request.capture_id)
    session = slot.active
    if not isinstance(session, Session) or session.capture_id != request.capture_id:
        return False
    _stopped.discard(request.capture_id)
    session.leave()
    session.finish(ending=request.ending, discard=request.discard)
    session.manifest_part.told = True  # the owner reads the part, and logs its problems
    session.write_cost()
    session.hand_back()
    return True


def prepare_worker(request: PrepareRequest, instance: object = None) -> PrepareAnswer:
    """Prepare this process: start its flight recorder, and check and prepare its profiler if it will be
    used.
    """
    config = request.config
    process, roles = _joined(request, instance)
    if switch.DISABLED:
        return PrepareAnswer(roles=roles)
    oom.watch(config, process, request.run_id, None)
    recorder = None if instance is None else _record(request, process)
    if request.record_only:
        return PrepareAnswer(roles=roles, recorder=recorder)
    chosen = decide_process(config, roles=roles, rank=process.rank, world_size=process.world_size)
    warnings = tuple(f"{name}: {reason}" for name, reason in missing_ranks(config, process).items())
    problem = None
    if library_loaded(config.tool) and may_record(config, chosen):
        try:
            backend = load_backend(config.tool, config)
            backend.check()
            backend.prepare()
        except ours() as error:
            problem = describe(error)
    return PrepareAnswer(roles=roles, recorder=recorder, problem=problem, warnings=warnings)


def _joined(request: WorkerRequest, instance: object) -> tuple[ProcessInfo, tuple[str, ...]]:
    """Apply the configuration to this process, and to the class of `instance`.

    Returns:
        This process, and all roles of its functions, its own role first.
    """
    config = request.config
    if not switch.DISABLED:
        if config.instrument:
            configured.apply(config, lenient=True)
            if instance is not None:
                configured.apply_to(instance)
        shutdown.handle(config)
    declared = decorated_roles(type(instance)) if instance is not None else ()
    role = request.role or next(iter(declared), "worker")
    process = identify(
        role,
        position=request.position,
        world_size=request.world_size,
        actor_id=_actor_id(),
        replica=request.replica,
    )
    return process, (role, *(other for other in declared if other != role))


def _record(request: WorkerRequest, process: ProcessInfo) -> ProcessInfo | None:
    """Start the flight recorder of this worker and return `process`. Return None if the recorder is off."""
    if request.config.record == "off":
        return None
    standing.start(request.config, process, request.run_id)
    return process


def decorated_roles(cls: type) -> tuple[str, ...]:
    """Return the roles of the decorated methods of `cls`, in order of definition."""
    members = (member for owner in reversed(cls.__mro__) for member in vars(owner).values())
    roles = (declared.role for declared in map(wrapping.declared, members) if declared is not None)
    return tuple(dict.fromkeys(filter(None, roles)))


def _actor_id() -> str | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    actor_id: str | None = ray.get_runtime_context().get_actor_id()
    return actor_id
