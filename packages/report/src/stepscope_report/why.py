"""Search for the calls that hold other calls, in the states of processes at one moment.

This file has more than 500 lines, because waits are found and culprits are ranked by the same index of calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from typing import TypeAlias

import msgspec

from stepscope.files.states import Frame, OpenSpan, ProcessState, Thread
from stepscope_report.formatting import count
from stepscope_report.table import grouped
from stepscope_report.waiting import (
    Behind,
    Call,
    Entered,
    Job,
    Launched,
    Process,
    RayCalls,
    asks_engine,
    collective_of,
    engine_call,
    has_each_rank_once,
    is_library,
    is_loaded,
    is_stuck,
    jobs_of,
    queue_of,
    rank_of,
    remote_call,
    say_call,
    say_where,
)

ENDED = "its process has ended"
"""Beginning of `Call.where` for a worker that died."""
_NO_ANSWER = "no answer"
_CIRCLE = 4
"""Largest number of calls that are named if calls wait for each other."""
_Site: TypeAlias = tuple[Job, str, Frame | None]
_EDGES = 50
"""Largest number of calls that a call is said to wait for if only its stack shows a wait. The oldest come
first."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `stepscope why`."""

    run_id: str
    step: int | None
    step_age_ns: int | None
    calls: tuple[Call, ...]
    """The open calls. First the spans, the oldest first; then engines, Ray actors and processes."""
    culprits: tuple[int, ...]
    """Indices in `calls` of the calls that wait for no other call, or only for each other, the most likely
    culprit first. Empty if `calls` is empty."""
    circle: int = 0
    """Number of calls at the beginning of `culprits` that wait for each other; 0 if the first culprit
    waits for no call."""
    held: int = 0
    """Number of calls that wait for the first culprit or for a call of its circle, directly or through
    others. Calls in `Call.alike` count too."""
    idle: tuple[str, ...]
    """Processes that are in no call, with the place of their main thread."""
    engines: tuple[str, ...]
    """Engines, with the state of their queues."""
    silent: tuple[str, ...]
    """Workers that did not answer."""
    fates: dict[str, str] = {}
    """{worker in `silent`: what is known about the worker's process}."""
    beside: tuple[str, ...] = ()
    """Other threads in the process of the first culprit. One of these threads may hold what the culprit
    waits for, such as a lock."""


def why(
    states: Sequence[ProcessState],
    fates: Mapping[str, str] | None = None,
    dead: Mapping[str, str] | None = None,
) -> Why:
    """Find which open calls wait for which, by the links of carriers and by the waits in stacks.

    Args:
        states: The states of at least one process.
        fates: {key of a worker that did not answer: what is known about the worker's process}.
        dead: {key of a process that died: its name}.
    """
    dead = {key: name for key, name in (dead or {}).items() if all(key != s.process.key for s in states)}
    fates = {key: f"{ENDED} (pid {key.rpartition('_pid')[2]})" for key in dead} | dict(fates or {})
    answer = _Answer(states, fates, dead)
    owner = answer.owner
    culprits, circle, held = answer.culprits()
    return Why(
        run_id=owner.run_id,
        step=owner.step,
        step_age_ns=owner.step_age_ns,
        calls=tuple(answer.joined()),
        culprits=tuple(culprits),
        circle=circle,
        held=held,
        beside=tuple(answer.beside(culprits[0])) if culprits else (),
        idle=tuple(f"{state.process.key}: {_main(state)}" for state in states if not state.spans),
        engines=tuple(
            f"{state.process.key} {engine.name}: {queue_of(engine)}"
            for state in states
            for engine in state.engines
        ),
        silent=tuple(answer.silent.values()),
        fates={name: fates[key] for key, name in answer.silent.items() if key in fates},
    )


def say_first(answer: Why) -> str:
    """Return one line about the first culprit, which holds other calls. `answer` must have a culprit."""
    first = answer.calls[answer.culprits[0]]
    if answer.circle:
        circle = [answer.calls[index] for index in answer.culprits[: min(answer.circle, _CIRCLE)]]
        text = "; ".join(map(say_call, circle))
        return f"{answer.circle} calls wait for each other: {text}{_say_held(answer.held, 'them')}"
    if is_dead(first):
        return f"Died: {say_call(first)}{_say_held(answer.held, 'it')}"
    if first.kind == "process" and not first.blocks:
        return f"Others wait for {say_call(first)}{_say_held(answer.held, 'it')}"
    if first.blocks:
        return f"Blocks its event loop: {say_call(first)}{_say_held(answer.held, 'this loop')}"
    return f"Waits for no other call: {say_call(first)}{_say_held(answer.held, 'it')}"


def is_dead(call: Call) -> bool:
    return call.kind == "process" and call.where.startswith(ENDED)


def _say_held(held: int, what: str) -> str:
    return f"; {count(held, 'call')} {'waits' if held == 1 else 'wait'} for {what}" if held else ""


def say_held(states: Sequence[ProcessState], dead: Mapping[str, str]) -> str:
    """Return one line about the call that holds the others; empty without states or calls.

    Args:
        dead: {key of a process that died: its name}.
    """
    answer = why(states, dead=dead) if states else None
    return "" if answer is None or not answer.culprits else say_first(answer)


class _Answer:
    """The open calls of all processes, and the calls that each call waits for."""

    def __init__(
        self, states: Sequence[ProcessState], fates: Mapping[str, str], dead: Mapping[str, str]
    ) -> None:
        self.states = states
        self.processes = {state.process.key: Process(state) for state in states}
        self.owner = next((state for state in states if state.step_age_ns is not None), states[0])
        workers = {key: name for state in states for key, name in state.workers.items()} | dict(dead)
        self.silent = {key: name for key, name in workers.items() if key not in self.processes}
        self._fates = fates
        self._ray = RayCalls(states)
        self._links: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        """{(process, span): its child spans in other processes}."""
        for state in states:
            for span in state.spans:
                if span.link is not None:
                    self._links[span.link.process, span.link.span].append((state.process.key, span.span))
        self._stacks: dict[tuple[str, int], Sequence[Frame]] = {}
        self._unlinked: dict[str, list[int]] = {}
        """{process: indices of its workers' calls that have no known caller}."""
        self._entered = Entered(states)
        self._launched = Launched(states, self.silent)
        self._jobs = jobs_of(states)
        self._peers: dict[Job, dict[int, ProcessState]] = defaultdict(dict)
        """{job: {rank: state of the rank's process}}. A job in which two processes have the same rank is left
        out."""
        for job, own in grouped(states, lambda state: self._jobs[state.process.key]).items():
            if has_each_rank_once(own):
                self._peers[job] = {rank: one for one in own if (rank := rank_of(one)) is not None}
        found = [self._call(process, span) for process in self.processes.values() for span in process.calls()]
        found.sort(key=lambda call: -call.age_ns)
        self.calls = found
        self._inside: dict[_Site, set[int | None]] = defaultdict(set)
        """{(job, collective, frame that called the collective): ranks in the collective}."""
        for call in found:
            if call.collective is not None:
                self._inside[self._site(call)].add(rank_of(self.processes[call.process].state))
        self._lacked: dict[_Site, tuple[int, ...]] = {}
        self._at = {(call.process, call.span): at for at, call in enumerate(found)}
        self._of: dict[str, list[int]] = defaultdict(list)
        """{process: indices in `calls` of the calls of this process}."""
        for at, call in enumerate(found):
            self._of[call.process].append(at)
        self._spans_end = len(found)
        self._engines = dict(self._engine_calls())
        self._actors = dict(self._actor_calls())
        self._holders = dict(self._loop_holders())
        self.edges = [self._waited_for(at) for at in range(self._spans_end)]
        self.edges += [self._waited_for_by_ray(call) for call in self.calls[self._spans_end :]]

    def _call(self, process: Process, span: OpenSpan) -> Call:
        frames, wait = process.frames(span)
        self._stacks[process.key, span.span] = frames
        collective = collective_of(frames)
        pending, missing = self._entered.awaited(process.state)
        if collective is None and missing and _is_of_main(process.state, span):
            collective = pending.op if pending is not None else None  # the stack may wait for the device
        joined = pending if collective is not None else None
        holds = span.thread in process.blocked and process.blocked[span.thread] == span.span
        return Call(
            process=process.key,
            span=span.span,
            role=span.role,
            stage=span.stage,
            began_ns=process.state.at_ns - span.age_ns,
            age_ns=span.age_ns,
            trajectory=span.trajectory,
            turn=span.turn,
            where=say_where(frames),
            collective=collective,
            group=None if joined is None else joined.description,
            number=None if joined is None else joined.number,
            missing=() if joined is None else missing,
            behind=self._behind(process.key) if _is_of_main(process.state, span) else None,
            waits=span.waits,
            wait=None if collective is not None else wait,
            blocks=holds,
            alike=span.alike,
        )

    def _behind(self, key: str) -> Behind | None:
        """Return the collectives in which a process is behind, by NCCL's counts, else by torch's, or None."""
        known = self.processes.get(key)
        by_torch = None if known is None else self._entered.behind(known.state)
        return self._launched.behind.get(key) or by_torch

    def _add(self, call: Call) -> int:
        self.calls.append(call)
        return len(self.calls) - 1

    def _engine_calls(self) -> Iterator[tuple[str, list[int]]]:
        """Yield (process, indices of the calls of its loaded engines) for each process with engines."""
        for process in self.processes.values():
            engines = process.state.engines
            if engines:
                asked = any(self._asks(process, span) for span in process.calls())
                loaded = [engine for engine in engines if is_loaded(engine, asked)]
                yield process.key, [self._add(engine_call(process.state, engine)) for engine in loaded]

    def _asks(self, process: Process, span: OpenSpan) -> bool:
        """Return whether a span waits for an engine, by its own stack or by the stack of one of its tasks."""
        stacks = (self._stacks[process.key, span.span], *(t.frames for t in process.tasks_of[span.span]))
        return any(asks_engine(frames, span.role) for frames in stacks)

    def _actor_calls(self) -> Iterator[tuple[str, list[int]]]:
        for actor, calls in self._ray.elsewhere().items():
            yield actor, [self._add(remote_call(call)) for call in calls]

    def _loop_holders(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Yield ((process, thread), index of the call that blocks the thread's event loop). If code outside
        of calls blocks the loop, a call of the kind `process` stands for that code.
        """
        for process in self.processes.values():
            for thread, span in process.blocked.items():
                if span is not None:
                    yield (process.key, thread), self._at[process.key, span]
                elif any(call.thread == thread for call in process.calls()):
                    frames = process.threads[thread].frames
                    where = f"in no call: {say_where(frames)}"
                    yield (process.key, thread), self._add(_no_call(process.state, where, blocks=True))

    # The methods below find what a call waits for.

    def _waited_for(self, at: int) -> set[int]:
        call, process = self.calls[at], self.processes[self.calls[at].process]
        span = process.spans[call.span]
        holder = self._holders.get((process.key, span.thread))
        if holder == at:
            return set()
        if holder is not None:
            return {holder}
        known = self._below(process, span)
        if process.key in self._engines and self._asks(process, span):
            engines = self._engines[process.key]
            known |= {engine for engine in engines if is_stuck(self.calls[engine])} or set(engines)
        behind = self._launched.awaited.get(process.key, ())
        if behind and not call.missing and not known and _is_of_main(process.state, span):
            known |= {at for key in behind for at in self._calls_of(key)}
        elif call.collective is not None:
            known |= set(self._missing_peers(call, process.state))
        if not known:
            known = set(self._by_its_stack(call, process))
        return known - {at}

    def _below(self, process: Process, span: OpenSpan) -> set[int]:
        """Return the calls below a span in other processes, and the calls that its tasks wait for."""
        ends = {(process.key, leaf) for leaf in process.leaves(process.awaited_spans(span))}
        for own in process.line(span.span):
            for key, top in self._links.get((process.key, own), ()):
                ends |= {(key, leaf) for leaf in self.processes[key].leaves([top])}
        return {self._at[end] for end in ends if end in self._at}

    def _by_its_stack(self, call: Call, process: Process) -> Iterator[int]:
        if call.wait == "ray":
            yield from self._waited_for_by_ray(call) or islice(self._workers(call, process), _EDGES)
        elif call.wait == "process":
            started = (p for p in self.processes.values() if process.state.process.pid in p.state.ancestors)
            here = process.state.process.host
            yield from chain.from_iterable(self._of[p.key] for p in started if p.state.process.host == here)
        elif call.wait == "thread":
            others = (at for at in self._of[process.key] if self.calls[at].wait != "thread")
            yield from islice(others, _EDGES)

    def _waited_for_by_ray(self, call: Call) -> set[int]:
        """Return the calls of actors that a call waits for, according to Ray."""
        if call.kind not in ("call", "actor"):
            return set()
        called = self._ray.called_by(call.process)
        return {at for key in called for at in (*self._of.get(key, ()), *self._actors.get(key, ()))}

    def _workers(self, call: Call, process: Process) -> Iterator[int]:
        """Yield the calls of Ray workers that began after `call` and have no known caller; if there are none,
        yield the workers that did not answer.
        """
        workers = process.state.workers.keys() or {
            key
            for key, other in self.processes.items()
            if other.state.process.actor_id and other.state.run_id == process.state.run_id
        }
        if process.key not in self._unlinked:
            calls = (at for key in workers if key != process.key for at in self._of.get(key, ()))
            self._unlinked[process.key] = sorted(at for at in calls if not self._is_linked(at))
        found = [at for at in self._unlinked[process.key] if self.calls[at].began_ns >= call.began_ns]
        yield from found or (self._silent(key) for key in workers if key in self.silent)

    def _is_linked(self, at: int) -> bool:
        process = self.processes[self.calls[at].process]
        return any(process.spans[own].link is not None for own in process.line(self.calls[at].span))

    def _missing_peers(self, call: Call, state: ProcessState) -> Iterator[int]:
        """Store the ranks that are missing in a call's collective in `Call.missing`, and yield the indices of
        the calls of these ranks.
        """
        peers = self._peers[self._jobs[state.process.key]]
        missing = call.missing or self._lacks(call, state)
        at = self._at[call.process, call.span]
        self.calls[at] = msgspec.structs.replace(call, missing=missing)
        for rank in missing:
            other = peers.get(rank)
            if other is None:
                role = state.process.role
                key = next((key for key in self.silent if key.startswith(f"{role}_rank{rank}_")), None)
                yield self._silent(key or f"{role} rank {rank}")
            else:
                yield from self._calls_of(other.process.key)

    def _calls_of(self, key: str) -> Sequence[int]:
        """Return the indices of a process' calls. If the process is in no call, or does not answer, return a
        call of the kind `process` that stands for it.
        """
        known = self.processes.get(key)
        return [self._silent(key)] if known is None else self._of[key] or [self._idle(known.state)]

    def _lacks(self, call: Call, state: ProcessState) -> tuple[int, ...]:
        """Return the ranks of the job that are not in the same collective, called from the same place. If
        all ranks that answered are in the collective, return the ranks that did not answer.
        """
        site, peers = self._site(call), self._peers[self._jobs[state.process.key]]
        if not peers:
            return ()
        if site not in self._lacked:
            size = state.process.world_size if state.process.rank is not None else None
            lacks = tuple(sorted(peers.keys() - self._inside[site]))
            self._lacked[site] = lacks or tuple(rank for rank in range(size or 0) if rank not in peers)
        return self._lacked[site]

    def _site(self, call: Call) -> _Site:
        """Return (job, collective, innermost frame outside of torch) of a call."""
        frames = self._stacks[call.process, call.span]
        caller = next((frame for frame in frames if "/torch/" not in frame.file), None)
        return self._jobs[call.process], call.collective or "", caller

    def _silent(self, key: str) -> int:
        role, _, rest = key.partition("_rank" if "_rank" in key else "_")
        if (key, 0) not in self._at:
            where = self._fates.get(key, _NO_ANSWER)
            self._at[key, 0] = self._add(
                Call(
                    kind="process",
                    process=key,
                    role=role if rest else key,
                    stage="",
                    age_ns=0,
                    where=where,
                    behind=self._behind(key),
                )
            )
        return self._at[key, 0]

    def _idle(self, state: ProcessState) -> int:
        key = state.process.key
        if (key, 0) not in self._at:
            idle = msgspec.structs.replace(_no_call(state, _main(state)), behind=self._behind(key))
            self._at[key, 0] = self._add(idle)
        return self._at[key, 0]

    # The methods below find the call that holds the others.

    def joined(self) -> Iterator[Call]:
        for call, edges in zip(self.calls, self.edges, strict=True):
            yield msgspec.structs.replace(call, waits_for=tuple(sorted(edges)))

    def culprits(self) -> tuple[list[int], int, int]:
        """Return `Why.culprits`, `Why.circle` and `Why.held`."""
        for key in self.silent:
            if self._fates.get(key, "").startswith(ENDED):
                self._silent(key)  # a dead worker comes first, even if no stack shows a wait for it
        self.edges += [set() for _ in self.calls[len(self.edges) :]]
        groups = [
            group for group in _components(self.edges) if all(self.edges[at] <= set(group) for at in group)
        ]
        awaited = self._awaited_by_the_step()
        self._waited_by = set().union(*self.edges)
        for group in groups:
            # First the youngest call at the rarest place, which may have skipped a collective.
            places = {at: (self.calls[at].collective, self.calls[at].where) for at in group}
            same = Counter(places.values())
            group.sort(key=lambda at, places=places, same=same: (same[places[at]], self.calls[at].age_ns))  # type: ignore[misc]
        groups.sort(key=lambda group: self._rank(group[0], awaited))
        found = [at for group in groups for at in group]
        circle = len(groups[0]) if groups and len(groups[0]) > 1 else 0
        return found, circle, self._held(groups[0]) if groups else 0

    def _rank(self, at: int, awaited: set[int]) -> tuple[bool, bool, int, bool, bool, bool, int]:
        """Return the sort key of a culprit.

        The order is: dead workers, stuck engines, working calls, waiting tasks, other waits and engines, and
        collectives without missing ranks. Within each of these, ranks that are behind in collectives come
        first, then calls that the step waits for, then calls that any call waits for, then older calls.
        """
        call = self.calls[at]
        works = call.wait in (None, "process") and not call.waits and call.kind != "engine"
        order = 0 if works else 1 if call.wait == "task" and not call.waits else 2
        if call.collective is not None and not self.edges[at]:
            order = 3
        ahead = call.behind is None
        aside = at not in awaited, at not in self._waited_by
        return not is_dead(call), not is_stuck(call), order, ahead, *aside, -call.age_ns

    def _awaited_by_the_step(self) -> set[int]:
        owners = {state.process.key for state in self.states if state.step_age_ns is not None}
        return self._reached([at for key in owners for at in self._of[key]], self.edges)

    def _held(self, culprits: Sequence[int]) -> int:
        """Return the number of calls that wait for `culprits`, directly or through others."""
        behind: list[set[int]] = [set() for _ in self.calls]
        for at, edges in enumerate(self.edges):
            for edge in edges:
                behind[edge].add(at)
        held = self._reached(culprits, behind) - set(culprits)
        return sum(1 + self.calls[at].alike for at in held)

    @staticmethod
    def _reached(starts: Sequence[int], edges: Sequence[set[int]]) -> set[int]:
        seen, rest = set(starts), list(starts)
        while rest:
            new = edges[rest.pop()] - seen
            seen |= new
            rest += new
        return seen

    def beside(self, culprit: int) -> Iterator[str]:
        """Yield the threads of the culprit's process that run the user's code outside of calls."""
        call = self.calls[culprit]
        process = self.processes.get(call.process)
        if process is None or call.kind != "call":
            return
        busy = {span.thread for span in process.state.spans}
        for thread in process.state.threads:
            if thread.id not in busy and any(not is_library(frame) for frame in thread.frames):
                yield f"thread {thread.name}: {say_where(thread.frames)}"


def _no_call(state: ProcessState, where: str, *, blocks: bool = False) -> Call:
    return Call(
        kind="process",
        process=state.process.key,
        role=state.process.role,
        stage="",
        age_ns=0,
        where=where,
        blocks=blocks,
    )


def _is_of_main(state: ProcessState, span: OpenSpan) -> bool:
    main = _main_thread(state)
    return main is not None and main.id == span.thread


def _main_thread(state: ProcessState) -> Thread | None:
    return next((thread for thread in state.threads if thread.name == "MainThread"), None)


def _main(state: ProcessState) -> str:
    main = _main_thread(state)
    where = "" if main is None else say_where(main.frames)
    return f"in no call{f': {where}' if where else ''}"


def _components(edges: Sequence[AbstractSet[int]]) -> list[list[int]]:
    """Return the strongly connected components of a graph, by Tarjan's algorithm.

    Args:
        edges: The nodes that each node leads to, by the number of the node.
    """
    found: list[list[int]] = []
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path = set[int]()
    for start in range(len(edges)):
        rest: list[tuple[int, Iterator[int]]] = [] if start in order else [(start, iter(edges[start]))]
        while rest:
            node, targets = rest[-1]
            if node not in order:
                order[node] = lowest[node] = len(order)
                path.append(node)
                on_path.add(node)
            for target in targets:
                if target not in order:
                    rest.append((target, iter(edges[target])))
                    break
                if target in on_path:
                    lowest[node] = min(lowest[node], order[target])
            else:
                rest.pop()
                if rest:
                    lowest[rest[-1][0]] = min(lowest[rest[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    at = path.index(node)
                    found.append(path[at:])
                    on_path.difference_update(path[at:])
                    del path[at:]
    return found
