"""Calls that wait for others, from the states of processes at one moment, and those that do not."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from stepscope.files.states import Frame, OpenSpan, ProcessState, Stacks, Task, Thread
from stepscope.report.formatting import duration, turn

_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<frozen")
_COLLECTIVES = "torch/distributed/"
"""A frame of these files is a collective, in which a process waits for others."""
_SKIPPED = ("_wrapper", "wrapper", "inner", "_call_impl")
"""Functions of torch.distributed that say nothing of the collective."""
_WAITING = (
    "threading.py", "selectors.py", "queue.py", "socket.py", "subprocess.py", "connection.py", "thread.py"
)  # fmt: skip
"""Files of the standard library in which a thread waits without the interpreter's lock."""
_LOOP = ("asyncio/base_events.py", "asyncio/runners.py", "selectors.py")


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
    waits: bool = False
    """Its stage only waits."""
    held: bool = False
    """Its process stands still: a thread holds the interpreter's lock in C. Its span is unknown, 0."""
    gone: bool = False
    """Its process has ended since."""
    waits_for: tuple[int, ...] = ()
    """Indices in `Why.calls` of calls in other processes, below it."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `stepscope why`."""

    run_id: str
    step: int | None
    step_age_ns: int | None
    calls: tuple[Call, ...]
    """Of all processes, the longest first."""
    culprits: tuple[int, ...]
    """Indices of the calls that wait for no other call, the most likely one first."""
    idle: tuple[str, ...]
    """Processes in no call, with what their main thread does."""
    silent: tuple[str, ...]
    """Workers without an answer and without stacks."""
    beside: tuple[str, ...] = ()
    """Other threads in the process of the first culprit: one of them may hold what it waits for."""


class Standstill(NamedTuple):
    """Stacks of a process that does not answer."""

    stacks: Stacks
    age_ns: int
    gone: bool
    """The process has ended."""


def why(states: Sequence[ProcessState], stills: Sequence[Standstill] = ()) -> Why:
    """Join the states of processes by their carriers.

    Args:
        stills: Processes without a state. One at least is needed, of either kind.
    """
    calls, places = _calls(states)
    calls += map(_standing_call, stills)
    joined = tuple(
        msgspec.structs.replace(call, waits_for=tuple(sorted(_waited_for(states, places, call))))
        for call in calls
    )
    owners = [state for state in states if state.step_age_ns is not None] or list(states)
    answered = {state.process.key for state in states} | {still.stacks.process.key for still in stills}
    expected = {key: name for state in states for key, name in state.workers.items()}
    culprits = tuple(_culprits(joined, states))
    return Why(
        run_id=owners[0].run_id if owners else stills[0].stacks.run_id,
        step=owners[0].step if owners else None,
        step_age_ns=owners[0].step_age_ns if owners else None,
        calls=joined,
        culprits=culprits,
        beside=tuple(_beside(states, stills, joined[culprits[0]])) if culprits else (),
        idle=tuple(f"{state.process.key}: {_main(state)}" for state in states if not state.spans),
        silent=tuple(name for key, name in expected.items() if key not in answered),
    )


def _calls(states: Sequence[ProcessState]) -> tuple[list[Call], dict[tuple[str, int], int]]:
    """Return the calls, and {(process, span): index} of them."""
    calls = []
    for state in states:
        above = {span.parent for span in state.spans}
        calls += [_call(state, span) for span in state.spans if span.span not in above]
    calls.sort(key=lambda call: -call.age_ns)
    return calls, {(call.process, call.span): index for index, call in enumerate(calls)}


def _call(state: ProcessState, span: OpenSpan) -> Call:
    frames = _frames_of(state, span)
    return Call(
        process=state.process.key,
        span=span.span,
        role=span.role,
        stage=span.stage,
        age_ns=span.age_ns,
        trajectory=span.trajectory,
        turn=span.turn,
        where=say_where(frames),
        collective=_collective(frames),
        waits=span.waits,
    )


def _standing_call(still: Standstill) -> Call:
    process, frames = still.stacks.process, _held_frames(still.stacks)
    return Call(
        process=process.key,
        span=0,
        role=process.role,
        stage="",
        age_ns=still.age_ns,
        where=say_where(frames),
        collective=_collective(frames),
        held=True,
        gone=still.gone,
    )


def _held_frames(stacks: Stacks) -> Sequence[Frame]:
    """Return the stack that most likely holds the lock: of the user's code and not waiting, the oldest."""
    busy = [thread.frames for thread in stacks.threads if _is_busy(thread.frames)]
    own = [frames for frames in busy if not all(map(_is_library, frames))]
    return (own or busy or [()])[-1]


def _is_busy(frames: Sequence[Frame]) -> bool:
    return not frames[0].file.endswith(_WAITING) and "/stepscope/" not in frames[0].file


def _frames_of(state: ProcessState, span: OpenSpan) -> Sequence[Frame]:
    """Return the stack of a span: of its task, else of its thread unless that only runs an event loop."""
    task = next((task for task in state.tasks if task.span == span.span), None)
    thread = next((thread for thread in state.threads if thread.id == span.thread), None)
    if thread is not None and _is_polling(thread):
        thread = None
    if task is not None and (thread is None or not _runs_in(task, thread)):
        return task.frames
    if thread is not None:
        return thread.frames
    unknown = [task for task in state.tasks if task.span is None and _ends_in_code(task)]
    # The deepest: the others await it, or what it awaits.
    return max((task.frames for task in unknown), key=len, default=())


def _runs_in(task: Task, thread: Thread) -> bool:
    """Return whether a thread runs the coroutine of a task, which it holds up with what it called."""
    places = {(frame.file, frame.function) for frame in thread.frames}
    return any((frame.file, frame.function) in places for frame in task.frames[:1])


def _ends_in_code(task: Task) -> bool:
    return any(not _is_library(frame) for frame in task.frames)


def _is_polling(thread: Thread) -> bool:
    """Return whether a thread runs an event loop that waits for something to happen."""
    return bool(thread.frames) and thread.frames[0].file.endswith(_LOOP[2])


def say_where(frames: Sequence[Frame]) -> str:
    """Return the innermost frame of the user's code, and the library call that it is in."""
    own = next((frame for frame in frames if not _is_library(frame)), None)
    if own is None:
        return "" if not frames else _place(frames[0])
    inner = frames[0]
    return _place(own) if inner is own else f"{_place(own)}, in {inner.function} ({_short(inner.file)})"


def _place(frame: Frame) -> str:
    return f"{frame.function} at {_short(frame.file)}:{frame.line}"


def _short(file: str) -> str:
    return "/".join(PurePath(file).parts[-2:])


def _is_library(frame: Frame) -> bool:
    if "/stepscope/" in frame.file or frame.file.startswith("<profile_step"):
        return True
    packages = _LIBRARIES[1] in frame.file or _LIBRARIES[2] in frame.file
    return packages or frame.file.startswith((_LIBRARIES[0], _LIBRARIES[3]))


def _collective(frames: Sequence[Frame]) -> str | None:
    inside = [frame for frame in frames if _COLLECTIVES in frame.file]
    named = [frame.function for frame in inside if frame.function not in _SKIPPED]
    return named[0] if named else (inside[0].function if inside else None)


def _waited_for(
    states: Sequence[ProcessState], places: dict[tuple[str, int], int], call: Call
) -> Iterator[int]:
    """Yield the calls of other processes below a call, or below a span above it in its process."""
    own = next((state for state in states if state.process.key == call.process), None)
    if own is None:
        return
    parents = {span.span: span.parent for span in own.spans}
    line: set[int | None] = set()
    at: int | None = call.span
    while at is not None and at not in line:
        line.add(at)
        at = parents.get(at)
    for state in states:
        below = {
            span.span for span in state.spans if span.link is not None
            and span.link.process == call.process and span.link.span in line
        }  # fmt: skip
        yield from _leaves(state, below, places)


def _leaves(state: ProcessState, tops: set[int], places: dict[tuple[str, int], int]) -> Iterator[int]:
    parents = {span.span: span.parent for span in state.spans}
    for span in parents:
        index = places.get((state.process.key, span))
        at: int | None = span
        for _ in range(len(parents) + 1):
            if index is None or at is None:
                break
            if at in tops:
                yield index
                break
            at = parents.get(at)


def _culprits(calls: Sequence[Call], states: Sequence[ProcessState]) -> list[int]:
    """Return the calls without others below them: of processes that stand still, then work, then what only
    waits, and last collectives.
    """
    last = [index for index, call in enumerate(calls) if not call.waits_for]
    in_collectives = [index for index in last if calls[index].collective is not None]
    free = [index for index in last if index not in in_collectives]
    apart = _apart_from_peers([calls[index] for index in in_collectives], calls, free, states)
    free.sort(
        key=lambda index: (
            not calls[index].held, index not in apart, calls[index].waits, -calls[index].age_ns
        )
    )  # fmt: skip
    return [*free, *in_collectives]


def _apart_from_peers(
    gathered: Sequence[Call], calls: Sequence[Call], free: Sequence[int], states: Sequence[ProcessState]
) -> list[int]:
    """Return the calls of processes whose peers, of the same role, are in a collective without them."""
    roles = {state.process.key: state.process.role for state in states}
    waiting = {roles.get(call.process, call.role) for call in gathered}
    return [index for index in free if roles.get(calls[index].process, calls[index].role) in waiting]


def _beside(states: Sequence[ProcessState], stills: Sequence[Standstill], call: Call) -> Iterator[str]:
    """Yield the threads of a call's process that run code of the user's outside of any call."""
    state = next((state for state in states if state.process.key == call.process), None)
    if state is None:
        (stacks,) = (still.stacks for still in stills if still.stacks.process.key == call.process)
        own = _held_frames(stacks)
        for thread in stacks.threads:
            if thread.frames is not own and not all(map(_is_library, thread.frames)):
                yield f"thread {thread.name}: {say_where(thread.frames)}".replace(" :", ":")
        return
    busy = {span.thread for span in state.spans}
    for thread in state.threads:
        if thread.id not in busy and any(not _is_library(frame) for frame in thread.frames):
            yield f"thread {thread.name}: {say_where(thread.frames)}"


def _main(state: ProcessState) -> str:
    main = next((thread for thread in state.threads if thread.name == "MainThread"), None)
    where = "" if main is None else say_where(main.frames)
    return f"in no call{f': {where}' if where else ''}"


def say_call(call: Call) -> str:
    """Return `actor_rank3_...: actor compute_log_prob since 312 s, forward at model.py:214`."""
    if call.held:
        gone = "; it has ended since" if call.gone else ""
        return f"{call.process}: Python stands still since {duration(call.age_ns)}, {call.where}{gone}"
    whose = "" if call.trajectory is None else f" ({turn(call.trajectory, call.turn)})"
    text = f"{call.process}: {call.role} {call.stage}{whose} since {duration(call.age_ns)}"
    if call.collective is not None:
        text += f", in the collective {call.collective}"
    return text + (f", {call.where}" if call.where else "")
