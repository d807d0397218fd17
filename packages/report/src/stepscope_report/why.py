"""Calls that wait for others, from the states of processes at one moment, and those that do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stepscope.files.states import EngineState, OpenSpan, ProcessState, RayCall
from stepscope_report.waiting import (
    STUCK_NS,
    Call,
    asks,
    asks_ray,
    call_of,
    engine_call,
    frames_of,
    is_library,
    is_stuck,
    queue_of,
    rank_of,
    remote_call,
    say_where,
)

_RUNNING = "RUNNING"
_MOST = 8
"""Calls of one actor that are listed."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `stepscope why`."""

    run_id: str
    step: int | None
    step_age_ns: int | None
    calls: tuple[Call, ...]
    """The calls of all processes, the longest first."""
    culprits: tuple[int, ...]
    """Indices of the calls that wait for no other call, the most likely one first."""
    idle: tuple[str, ...]
    """Processes in no call, with what their main thread does."""
    engines: tuple[str, ...]
    """Engines and their queues."""
    silent: tuple[str, ...]
    """Workers without an answer."""
    beside: tuple[str, ...] = ()
    """Other threads in the process of the first culprit: one of them may hold what it waits for."""


def why(states: Sequence[ProcessState]) -> Why:
    """Join the states of processes by their carriers.

    Args:
        states: At least one.
    """
    calls, places = _calls(states)
    calls += [engine_call(state, engine) for state in states for engine in _loaded(state)]
    ray = _RayCalls(states)
    calls += [remote_call(task) for tasks in ray.elsewhere().values() for task in tasks]
    edges = [sorted(_all_waited_for(states, places, calls, call, ray)) for call in calls]
    joined = tuple(
        msgspec.structs.replace(call, waits_for=tuple(indices))
        for call, indices in zip(calls, edges, strict=True)
    )
    owners = [state for state in states if state.step_age_ns is not None] or list(states)
    answered = {state.process.key for state in states}
    expected = {key: name for state in states for key, name in state.workers.items()}
    culprits = tuple(_culprits(joined, states))
    return Why(
        run_id=owners[0].run_id,
        step=owners[0].step,
        step_age_ns=owners[0].step_age_ns,
        calls=joined,
        culprits=culprits,
        beside=tuple(_beside(states, joined[culprits[0]])) if culprits else (),
        idle=tuple(f"{state.process.key}: {_main(state)}" for state in states if not state.spans),
        engines=tuple(
            f"{state.process.key} {engine.name}: {queue_of(engine)}"
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
        calls += [call_of(state, span, states) for span in state.spans if span.span not in above]
    calls.sort(key=lambda call: -call.age_ns)
    return calls, {(call.process, call.span): index for index, call in enumerate(calls)}


def _loaded(state: ProcessState) -> Iterator[EngineState]:
    """Yield the engines of a process that have requests, or calls and no answer for longer than usual."""
    asked = any(asks(state, span) for span in state.spans)
    for engine in state.engines:
        if engine.requests or (asked and engine.sampled_ns > STUCK_NS):
            yield engine


def _asked(states: Sequence[ProcessState], calls: Sequence[Call], call: Call) -> Iterator[int]:
    """Yield the engines that a call waits for: those of its process, if it is in one or asks one."""
    if not any(asks(state, span) for state, span in _spans_of(states, call)):
        return
    engines = [at for at, other in enumerate(calls) if other.engine and other.process == call.process]
    stuck = [at for at in engines if is_stuck(calls[at])]
    yield from stuck or engines


def _all_waited_for(
    states: Sequence[ProcessState],
    places: dict[tuple[str, int], int],
    calls: Sequence[Call],
    call: Call,
    ray: _RayCalls,
) -> set[int]:
    """Return the calls that a call waits for: by carriers, in an engine, or else by Ray."""
    known = {*_waited_for(states, places, call), *_asked(states, calls, call)}
    in_ray = (asks_ray(frames_of(state, span)) for state, span in _spans_of(states, call))
    if known or not (call.remote or any(in_ray)):
        return known
    processes = ray.called_by(call.process)
    return {index for index, other in enumerate(calls) if other.process in processes}


def _spans_of(states: Sequence[ProcessState], call: Call) -> Iterator[tuple[ProcessState, OpenSpan]]:
    """Yield the span of a call, with its process. Nothing of a call without one."""
    for state in states:
        if state.process.key == call.process:
            yield from ((state, span) for span in state.spans if span.span == call.span)


def _waited_for(
    states: Sequence[ProcessState], places: dict[tuple[str, int], int], call: Call
) -> Iterator[int]:
    """Yield the calls of other processes below a call, or below a span above it in its process."""
    own = next((state for state in states if state.process.key == call.process), None)
    if own is None:
        return
    line = _line({span.span: span.parent for span in own.spans}, call.span)
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
        if index is not None and not tops.isdisjoint(_line(parents, span)):
            yield index


def _line(parents: Mapping[int, int | None], span: int) -> set[int]:
    """Return a span and those above it in its process."""
    line = set[int]()
    at: int | None = span
    while at is not None and at not in line:
        line.add(at)
        at = parents.get(at)
    return line


def _culprits(calls: Sequence[Call], states: Sequence[ProcessState]) -> list[int]:
    """Return the calls without others below them: of engines that stand still, then work, then
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
            not is_stuck(calls[index]),
            index not in apart,
            calls[index].waits,
            -calls[index].age_ns,
        )
    )
    return [*free, *in_collectives]


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


def _beside(states: Sequence[ProcessState], call: Call) -> Iterator[str]:
    """Yield the threads of a call's process that run code of the user's outside of any call."""
    state = next((state for state in states if state.process.key == call.process), None)
    if state is None:
        return
    busy = {span.thread for span in state.spans}
    for thread in state.threads:
        if thread.id not in busy and any(not is_library(frame) for frame in thread.frames):
            yield f"thread {thread.name}: {say_where(thread.frames)}"


def _main(state: ProcessState) -> str:
    main = next((thread for thread in state.threads if thread.name == "MainThread"), None)
    where = "" if main is None else say_where(main.frames)
    return f"in no call{f': {where}' if where else ''}"


class _RayCalls:
    """Open calls by actor. `asker` is the key of the process that asked Ray, the driver as a rule."""

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self.asker: ProcessState | None = next((state for state in states if state.ray_calls), None)
        calls = () if self.asker is None else self.asker.ray_calls
        self._keys = {state.process.actor_id: state.process.key for state in states if state.process.actor_id}
        self._of: dict[str, list[RayCall]] = defaultdict(list)
        self._called: dict[str | None, set[str]] = defaultdict(set)
        for call in calls:
            self._of[call.actor].append(call)
            if call.caller != call.actor:
                self._called[call.caller].add(call.actor)

    def elsewhere(self) -> dict[str, list[RayCall]]:
        """Return {actor: calls that it runs} of those that do not record; those that wait if it runs none."""
        return {
            actor: ([call for call in calls if call.state == _RUNNING] or calls)[:_MOST]
            for actor, calls in self._of.items()
            if actor not in self._keys
        }

    def called_by(self, process: str) -> set[str]:
        """Return the processes, or actors, whose calls a process waits for.

        Args:
            process: `ProcessInfo.key`, or the id of an actor that does not record.
        """
        own = next((actor for actor, key in self._keys.items() if key == process), process)
        actors = set(self._called.get(own, ()))
        if self.asker is not None and process == self.asker.process.key:
            actors |= self._called.get(None, set())
        return {self._keys.get(actor, actor) for actor in actors} - {process}
