"""Calls that wait for others, from the states of processes at one moment, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.files.states import EngineState, Frame, OpenSpan, ProcessState, Stacks, Task, Thread
from stepscope.report.formatting import duration, turn
from stepscope.report.missing_ranks import awaited_collective, rank_of
from stepscope.report.places import (
    asks_engine,
    collective_of,
    ends_in_code,
    held_frames,
    is_library,
    is_polling,
    say_where,
)

_STUCK_NS = 10 * 10**9
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
    held: bool = False
    """Its process stands still: a thread holds the interpreter's lock in C. Its span is unknown, 0."""
    engine: bool = False
    """It is the queue of an engine, `stage`; its age is the time without a token. Its span is unknown, 0."""
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
    engines: tuple[str, ...]
    """Engines and their queues."""
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
    calls += [_engine_call(state, engine) for state in states for engine in _loaded(state)]
    joined = tuple(
        msgspec.structs.replace(
            call, waits_for=tuple(sorted({*_waited_for(states, places, call), *_asked(states, calls, call)}))
        )
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
        engines=tuple(
            f"{state.process.key} {engine.name}: {_queue(engine)}"
            for state in states
            for engine in state.engines
        ),
        silent=tuple(name for key, name in expected.items() if key not in answered),
    )


def _calls(states: Sequence[ProcessState]) -> tuple[list[Call], dict[tuple[str, int], int]]:
    """Return the calls, and {(process, span): index} of them."""
    calls = []
    for state in states:
        above = {span.parent for span in state.spans}
        calls += [_call(state, span, states) for span in state.spans if span.span not in above]
    calls.sort(key=lambda call: -call.age_ns)
    return calls, {(call.process, call.span): index for index, call in enumerate(calls)}


def _call(state: ProcessState, span: OpenSpan, states: Sequence[ProcessState]) -> Call:
    frames = _frames_of(state, span)
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


def _loaded(state: ProcessState) -> Iterator[EngineState]:
    """Yield the engines of a process that have requests, or calls and no answer for longer than usual."""
    asked = any(_asks(state, span) for span in state.spans)
    for engine in state.engines:
        if engine.requests or (asked and engine.sampled_ns > _STUCK_NS):
            yield engine


def _engine_call(state: ProcessState, engine: EngineState) -> Call:
    return Call(
        process=state.process.key,
        span=0,
        role="rollout",
        stage=engine.name,
        age_ns=engine.sampled_ns if engine.still_ns is None else engine.still_ns,
        where=_queue(engine),
        engine=True,
    )


def _queue(engine: EngineState) -> str:
    """Return `8 requests (6 running, 2 waiting), KV cache 97 %, no token for 41 s`."""
    counts = {"running": engine.running, "waiting": engine.waiting}
    known = ", ".join(f"{count:.0f} {name}" for name, count in counts.items() if count is not None)
    text = f"{engine.requests} requests" + (f" ({known})" if known else "")
    if engine.kv_percent is not None:
        text += f", KV cache {engine.kv_percent:.0f} %"
    if engine.still_ns is not None:
        text += f", no token for {duration(engine.still_ns)}"
    if engine.sampled_ns > _STUCK_NS:
        text += f", no answer for {duration(engine.sampled_ns)}"
    return text


def _asked(states: Sequence[ProcessState], calls: Sequence[Call], call: Call) -> Iterator[int]:
    """Yield the engines that a call waits for: those of its process, if it is in one or asks one."""
    state = next((state for state in states if state.process.key == call.process), None)
    span = None if state is None else next((span for span in state.spans if span.span == call.span), None)
    if state is None or span is None or not _asks(state, span):
        return
    engines = [at for at, other in enumerate(calls) if other.engine and other.process == call.process]
    stuck = [at for at in engines if _is_stuck(calls[at])]
    yield from stuck or engines


def _asks(state: ProcessState, span: OpenSpan) -> bool:
    """Return whether a span asks an engine. Where no task says its span, any of the tasks may be its own."""
    if asks_engine(_frames_of(state, span), span.role):
        return True
    thread = next((thread for thread in state.threads if thread.id == span.thread), None)
    is_known = any(task.span is not None for task in state.tasks) or thread is None or not is_polling(thread)
    return not is_known and any(
        asks_engine(task.frames, span.role) for task in state.tasks if ends_in_code(task)
    )


def _is_stuck(call: Call) -> bool:
    return call.engine and call.age_ns >= _STUCK_NS


def _standing_call(still: Standstill) -> Call:
    process, frames = still.stacks.process, held_frames(still.stacks)
    return Call(
        process=process.key,
        span=0,
        role=process.role,
        stage="",
        age_ns=still.age_ns,
        where=say_where(frames),
        collective=collective_of(frames),
        held=True,
        gone=still.gone,
    )


def _frames_of(state: ProcessState, span: OpenSpan) -> Sequence[Frame]:
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
    """Return the calls without others below them: of processes and engines that stand still, then work, then
    what only waits, and last collectives.
    """
    last = [index for index, call in enumerate(calls) if not call.waits_for]
    in_collectives = [index for index in last if calls[index].collective is not None]
    free = [index for index in last if index not in in_collectives]
    gathered = [calls[index] for index in in_collectives]
    work = [index for index in free if not calls[index].engine]
    apart = _apart_from_peers(gathered, calls, work, states)
    free.sort(
        key=lambda index: (
            _goes_on(calls[index]),
            index not in apart,
            calls[index].waits,
            -calls[index].age_ns,
        )
    )
    return [*free, *in_collectives]


def _goes_on(call: Call) -> bool:
    return not call.held and not _is_stuck(call)


def _apart_from_peers(
    gathered: Sequence[Call], calls: Sequence[Call], free: Sequence[int], states: Sequence[ProcessState]
) -> list[int]:
    """Return the calls of processes whose peers, of the same role, are in a collective without them.

    Where a peer knows the ranks that miss, only their calls.
    """
    roles = {state.process.key: state.process.role for state in states}
    ranks = {state.process.key: rank_of(state) for state in states}
    waiting = {roles.get(call.process, call.role) for call in gathered}
    named = {(roles.get(call.process), rank) for call in gathered for rank in call.missing}
    apart = [index for index in free if roles.get(calls[index].process, calls[index].role) in waiting]
    missing = [at for at in apart if (roles.get(calls[at].process), ranks.get(calls[at].process)) in named]
    return missing or apart


def _beside(states: Sequence[ProcessState], stills: Sequence[Standstill], call: Call) -> Iterator[str]:
    """Yield the threads of a call's process that run code of the user's outside of any call."""
    state = next((state for state in states if state.process.key == call.process), None)
    if state is None:
        (stacks,) = (still.stacks for still in stills if still.stacks.process.key == call.process)
        own = held_frames(stacks)
        for thread in stacks.threads:
            if thread.frames is not own and not all(map(is_library, thread.frames)):
                yield f"thread {thread.name}: {say_where(thread.frames)}".replace(" :", ":")
        return
    busy = {span.thread for span in state.spans}
    for thread in state.threads:
        if thread.id not in busy and any(not is_library(frame) for frame in thread.frames):
            yield f"thread {thread.name}: {say_where(thread.frames)}"


def _main(state: ProcessState) -> str:
    main = next((thread for thread in state.threads if thread.name == "MainThread"), None)
    where = "" if main is None else say_where(main.frames)
    return f"in no call{f': {where}' if where else ''}"


def _missing(call: Call) -> str:
    """Return ` (7 of default_pg, without rank 3)`, as far as it is known."""
    if call.group is None:
        return ""
    number = "" if call.number is None else f"{call.number} "
    ranks = ", ".join(map(str, call.missing[:8])) + (" ..." if len(call.missing) > 8 else "")
    noun = "rank" if len(call.missing) == 1 else "ranks"
    return f" ({number}of {call.group}{f', without {noun} {ranks}' if call.missing else ''})"


def say_call(call: Call) -> str:
    """Return `actor_rank3_...: actor compute_log_prob since 312 s, forward at model.py:214`."""
    if call.held:
        gone = "; it has ended since" if call.gone else ""
        return f"{call.process}: Python stands still since {duration(call.age_ns)}, {call.where}{gone}"
    if call.engine:
        return f"{call.process}: engine {call.stage}, {call.where}"
    whose = "" if call.trajectory is None else f" ({turn(call.trajectory, call.turn)})"
    text = f"{call.process}: {call.role} {call.stage}{whose} since {duration(call.age_ns)}"
    if call.collective is not None:
        text += f", in the collective {call.collective}{_missing(call)}"
    return text + (f", {call.where}" if call.where else "")
