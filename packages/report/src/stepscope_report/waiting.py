"""Calls in the answer to `stepscope why`: what processes, engines and Ray actors are in."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from stepscope.files.states import (
    EngineState,
    Frame,
    OpenSpan,
    PendingCollective,
    ProcessGroup,
    ProcessState,
    RayCall,
    Task,
    Thread,
)
from stepscope_report.formatting import duration, few, turn

_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<frozen")
_COLLECTIVES = "torch/distributed/"
"""A frame of these files is a collective, in which a process waits for others."""
_ENGINES = ("/vllm/", "/sglang/")
_CLIENTS = ("/httpx/", "/aiohttp/", "/openai/", "/requests/", "/http/client.py", "/urllib/")
"""Frames in these files are calls of an engine; a client's only in the role `rollout`."""
_RAY = "/ray/_private/worker.py"
_SKIPPED = ("_wrapper", "wrapper", "inner", "_call_impl")
"""Functions of torch.distributed that say nothing of the collective."""


def ends_in_code(task: Task) -> bool:
    return any(not is_library(frame) for frame in task.frames)


def is_polling(thread: Thread) -> bool:
    """Return whether a thread runs an event loop that waits for something to happen."""
    return thread.in_loop or (bool(thread.frames) and thread.frames[0].file.endswith("selectors.py"))


def say_where(frames: Sequence[Frame]) -> str:
    """Return the innermost frame of the user's code, and the library call that it is in."""
    own = next((frame for frame in frames if not is_library(frame)), None)
    if own is None:
        return "" if not frames else _place(frames[0])
    inner = frames[0]
    return _place(own) if inner is own else f"{_place(own)}, in {inner.function} ({_short(inner.file)})"


def _place(frame: Frame) -> str:
    return f"{frame.function} at {_short(frame.file)}:{frame.line}"


def _short(file: str) -> str:
    return "/".join(PurePath(file).parts[-2:])


def is_library(frame: Frame) -> bool:
    if "/stepscope/" in frame.file or frame.file.startswith("<profile_step"):
        return True
    packages = _LIBRARIES[1] in frame.file or _LIBRARIES[2] in frame.file
    return packages or frame.file.startswith((_LIBRARIES[0], _LIBRARIES[3]))


def collective_of(frames: Sequence[Frame]) -> str | None:
    inside = [frame for frame in frames if _COLLECTIVES in frame.file]
    named = [frame.function for frame in inside if frame.function not in _SKIPPED]
    return named[0] if named else (inside[0].function if inside else None)


def asks_ray(frames: Sequence[Frame]) -> bool:
    """Return whether a stack waits in Ray, as `ray.get` and `ray.wait` do."""
    return any(_RAY in frame.file for frame in frames)


def asks_engine(frames: Sequence[Frame], role: str) -> bool:
    files = [frame.file for frame in frames]
    parts = (*_ENGINES, *_CLIENTS) if role == "rollout" else _ENGINES
    return any(part in file for file in files for part in parts)


STUCK_NS = 10 * 10**9
"""An engine with requests and without a token for so long comes before other work."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call that goes on: a span that has not ended and has none below it in its process."""

    process: str
    """`ProcessInfo.key`."""
    span: int
    role: str
    stage: str
    age_ns: int
    trajectory: str | None = None
    turn: int | None = None
    where: str
    """`lock.acquire, from forward at model.py:214`; empty if nothing tells."""
    collective: str | None = None
    """The collective that it is in."""
    group: str | None = None
    """Its process group, by torch's flight recorder."""
    number: int | None = None
    """Its number in that group."""
    missing: tuple[int, ...] = ()
    """Ranks that have not entered it, of those that answered."""
    waits: bool = False
    """Its stage only waits."""
    remote: bool = False
    """True for a method of a Ray actor that does not record, known from Ray. Its `span` is 0."""
    engine: bool = False
    """True for an engine's queue, named by `stage`; its age is the time without a token. Its `span` is 0."""
    waits_for: tuple[int, ...] = ()
    """Indices in `Why.calls` of calls in other processes, below it."""


def call_of(state: ProcessState, span: OpenSpan, states: Sequence[ProcessState]) -> Call:
    frames = frames_of(state, span)
    collective = collective_of(frames)
    pending, missing = awaited_collective(state, states)
    main = next((thread for thread in state.threads if thread.name == "MainThread"), None)
    if collective is None and missing and main is not None and main.id == span.thread:
        collective = pending.op if pending is not None else None  # a wait for the device, by another name
    joined = pending if collective is not None else None
    return Call(
        process=state.process.key,
        span=span.span,
        role=span.role,
        stage=span.stage,
        age_ns=span.age_ns,
        trajectory=span.trajectory,
        turn=span.turn,
        where=say_where(frames),
        collective=collective,
        group=None if joined is None else joined.description,
        number=None if joined is None else joined.number,
        missing=() if joined is None else missing,
        waits=span.waits,
    )


def engine_call(state: ProcessState, engine: EngineState) -> Call:
    return Call(
        process=state.process.key,
        span=0,
        role="rollout",
        stage=engine.name,
        age_ns=engine.sampled_ns if engine.still_ns is None else engine.still_ns,
        where=queue_of(engine),
        engine=True,
    )


def queue_of(engine: EngineState) -> str:
    """Return `8 requests (6 running, 2 waiting), KV cache 97 %, no token for 41 s`."""
    counts = {"running": engine.running, "waiting": engine.waiting}
    known = ", ".join(f"{count:.0f} {name}" for name, count in counts.items() if count is not None)
    text = f"{engine.requests} requests" + (f" ({known})" if known else "")
    if engine.kv_percent is not None:
        text += f", KV cache {engine.kv_percent:.0f} %"
    if engine.still_ns is not None:
        text += f", no token for {duration(engine.still_ns)}"
    if engine.sampled_ns > STUCK_NS:
        text += f", no answer for {duration(engine.sampled_ns)}"
    return text


def asks(state: ProcessState, span: OpenSpan) -> bool:
    """Return whether a span asks an engine. Where no task says its span, any of the tasks may be its own; a
    rollout may have gathered tasks of the engine alone.
    """
    if asks_engine(frames_of(state, span), span.role):
        return True
    thread = next((thread for thread in state.threads if thread.id == span.thread), None)
    is_known = any(task.span is not None for task in state.tasks) or thread is None or not is_polling(thread)
    return not is_known and any(
        asks_engine(task.frames, span.role)
        for task in state.tasks
        if ends_in_code(task) or span.role == "rollout"
    )


def is_stuck(call: Call) -> bool:
    return call.engine and call.age_ns >= STUCK_NS


def frames_of(state: ProcessState, span: OpenSpan) -> Sequence[Frame]:
    """Return the stack of a span: of its task, else of its thread unless that only runs an event loop."""
    task = next((task for task in state.tasks if task.span == span.span), None)
    thread = next((thread for thread in state.threads if thread.id == span.thread), None)
    if thread is not None and is_polling(thread):
        thread = None
    if task is not None and (thread is None or not _runs_in(task, thread)):
        return task.frames
    if thread is not None:
        return thread.frames
    unknown = [task for task in state.tasks if task.span is None and ends_in_code(task)]
    # The deepest: the others await it, or what it awaits.
    return max((task.frames for task in unknown), key=len, default=())


def _runs_in(task: Task, thread: Thread) -> bool:
    """Return whether a thread runs the coroutine of a task, which it holds up with what it called."""
    places = {(frame.file, frame.function) for frame in thread.frames}
    return any((frame.file, frame.function) in places for frame in task.frames[:1])


def remote_call(task: RayCall) -> Call:
    place = "" if task.pid is None else f" (pid {task.pid})"
    return Call(
        process=task.actor,
        span=0,
        role=task.method.partition(".")[0],
        stage=task.method,
        age_ns=task.age_ns,
        where=f"{task.state}{place}",
        remote=True,
    )


def _missing(call: Call) -> str:
    """Return ` (7 of default_pg, without rank 3)`, as far as it is known."""
    if call.group is None:
        return ""
    number = "" if call.number is None else f"{call.number} "
    ranks = few([str(rank) for rank in call.missing], 8)
    noun = "rank" if len(call.missing) == 1 else "ranks"
    return f" ({number}of {call.group}{f', without {noun} {ranks}' if call.missing else ''})"


def say_call(call: Call) -> str:
    """Return `actor_rank3_...: actor compute_log_prob since 312 s, forward at model.py:214`."""
    if call.remote:
        return f"Ray actor {call.process[:8]}: {call.stage} since {duration(call.age_ns)}, {call.where}"
    if call.engine:
        return f"{call.process}: engine {call.stage}, {call.where}"
    whose = "" if call.trajectory is None else f" ({turn(call.trajectory, call.turn)})"
    text = f"{call.process}: {call.role} {call.stage}{whose} since {duration(call.age_ns)}"
    if call.collective is not None:
        text += f", in the collective {call.collective}{_missing(call)}"
    return text + (f", {call.where}" if call.where else "")


def awaited_collective(
    state: ProcessState, states: Sequence[ProcessState]
) -> tuple[PendingCollective | None, tuple[int, ...]]:
    """Return the oldest open collective of a process, and the ranks that have not entered it.

    Args:
        states: Of all processes. Ranks that do not answer are not listed. Peers have the same role: a run may
            have several jobs of torch.distributed, whose groups have the same names.
    """
    own = state.collectives
    if own is None or not own.pending:
        return None, ()
    call = own.pending[0]
    group = next((group for group in own.groups if group.name == call.group), None)
    if group is None or call.number is None:
        return call, ()
    entered = {
        other.collectives.rank: _entered(other, group)
        for other in states
        if other.collectives is not None and other.process.role == state.process.role
    }
    return call, tuple(rank for rank in group.ranks if entered.get(rank, call.number) < call.number)


def _entered(state: ProcessState, group: ProcessGroup) -> int:
    """Return the number of the last collective of a group that a process entered; -1 for none."""
    groups = () if state.collectives is None else state.collectives.groups
    same = (other.entered for other in groups if (other.name, other.ranks) == (group.name, group.ranks))
    return next(same, -1)


def rank_of(state: ProcessState) -> int | None:
    return state.process.rank if state.collectives is None else state.collectives.rank
