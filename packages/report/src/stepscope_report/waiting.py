"""Open calls of processes, engines and Ray actors at one moment, and what each call waits for.

This file has more than 500 lines, because waits of calls and ranks that are behind are found in the same
states.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import PurePath
from typing import Literal, TypeAlias

import msgspec

from stepscope.files.states import (
    Communicator,
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
from stepscope_report.formatting import count, duration, few, turn

_LIBRARY = re.compile(
    r"/lib(64)?/python3\.\d+t?/|\b(site|dist)-packages/|/stepscope/|^<frozen|^<profile_step"
)
_INNERMOST = 4
"""Number of innermost frames that are searched for a wait. Frames further out may belong to code that runs
the call, such as an executor."""
_COLLECTIVES = re.compile(
    r"torch/distributed/(distributed_c10d|c10d_logger|rendezvous|_functional_collectives)"
)
"""Files whose functions are collectives. A process whose innermost frame is in such a file waits for other
ranks."""
_ENGINES = ("/vllm/", "/sglang/")
_CLIENTS = ("/httpx/", "/aiohttp/", "/openai/", "/requests/", "/http/client.py", "/urllib/")
"""Files of HTTP clients. In the role `rollout`, a frame in such a file means a call to an engine."""
Wait: TypeAlias = Literal["ray", "process", "thread", "task"]
"""Target of a wait: Ray, a process that the waiting process started, or another of its threads or tasks."""
_WAITS: dict[Wait, tuple[str, ...]] = {
    "ray": ("/ray/_private/worker.py",),
    "process": ("/subprocess.py", "/multiprocessing/"),
    "thread": ("/threading.py", "/queue.py", "/concurrent/futures/_base.py"),
}
"""Files whose functions wait. A call waits if one of its innermost frames is in such a file."""
_SKIPPED = ("_wrapper", "wrapper", "inner", "_call_impl")
"""Wrapper functions in torch.distributed, whose names are not the collective's."""


def _is_polling(thread: Thread) -> bool:
    """Return whether a thread runs an event loop that waits for events."""
    return thread.in_loop or (bool(thread.frames) and thread.frames[0].file.endswith("selectors.py"))


def say_where(frames: Sequence[Frame]) -> str:
    """Return a stack's place as text: the innermost frame of the user's code, and the innermost library
    function that this code has called. Empty without frames; the innermost frame if all frames are of
    libraries.
    """
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
    return _is_library(frame.file)


@lru_cache(4096)
def _is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


def collective_of(frames: Sequence[Frame]) -> str | None:
    """Return the function of torch.distributed that a stack waits in, or None if it waits in none."""
    inside = [frame for frame in _inner(frames) if _COLLECTIVES.search(frame.file)]
    named = [frame.function for frame in inside if frame.function not in _SKIPPED]
    return named[0] if named else (inside[0].function if inside else None)


def _inner(frames: Sequence[Frame]) -> Iterable[Frame]:
    """Return the library frames inside the innermost frame of the user's code; at most `_INNERMOST`."""
    return takewhile(is_library, frames[:_INNERMOST])


def _wait_of(frames: Sequence[Frame]) -> Wait | None:
    """Return what a stack waits for, or None if its frames show no wait."""
    inner = list(_inner(frames))
    for wait, files in _WAITS.items():
        if any(file in frame.file for frame in inner for file in files):
            return wait
    return None


def asks_engine(frames: Sequence[Frame], role: str) -> bool:
    files = [frame.file for frame in frames]
    parts = (*_ENGINES, *_CLIENTS) if role == "rollout" else _ENGINES
    return any(part in file for file in files for part in parts)


_STUCK_NS = 10 * 10**9
"""Time without a token after which an engine with requests counts as stuck."""


Kind: TypeAlias = Literal["call", "engine", "actor", "process"]
"""Kind of a call. `call`: a span. `engine`: an engine's queue; its `stage` is the engine's name, and its age
is the time without a token. `actor`: a method of a Ray actor that does not record. `process`: a process that
is in no call, or does not answer."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An open call: a span that has not ended and has no open child in its process, or another `kind`."""

    kind: Kind = "call"
    process: str
    """`ProcessInfo.key` of the call's process."""
    span: int = 0
    """Number of the span; 0 for kinds other than `call`."""
    role: str
    stage: str
    began_ns: int = 0
    """Start of the call in unix ns, or 0 if unknown."""
    age_ns: int
    trajectory: str | None = None
    turn: int | None = None
    where: str
    """Current place of the call: `forward at model.py:214, in acquire (threading.py)`; empty if unknown."""
    collective: str | None = None
    """Name of the collective that the call is in, or None if the call is in no collective."""
    group: str | None = None
    """Process group of the collective, from torch's flight recorder. None if unknown."""
    number: int | None = None
    """Number of the collective in `group`, or None if unknown."""
    missing: tuple[int, ...] = ()
    """Ranks that have not entered the collective. Empty if unknown."""
    behind: Behind | None = None
    """The collectives in which the call's process is behind, or None if the process is not behind."""
    waits: bool = False
    """True if the call's stage does nothing but wait."""
    wait: Wait | None = None
    """Target of the call's wait by its stack, or None if the stack shows no wait."""
    blocks: bool = False
    """True if the call blocks the event loop on which it runs."""
    alike: int = 0
    """Number of younger calls of the same stage at the same place, which are not listed."""
    waits_for: tuple[int, ...] = ()
    """Indices in `Why.calls` of the calls that this call waits for."""


def engine_call(state: ProcessState, engine: EngineState) -> Call:
    return Call(
        kind="engine",
        process=state.process.key,
        role="rollout",
        stage=engine.name,
        age_ns=engine.sampled_ns if engine.still_ns is None else engine.still_ns,
        where=queue_of(engine),
    )


def is_loaded(engine: EngineState, asked: bool) -> bool:
    """Return whether an engine has requests, or may have some: a call asks the engine, which has shown no
    counters for `_STUCK_NS`.
    """
    return bool(engine.requests) or (asked and engine.sampled_ns > _STUCK_NS)


def queue_of(engine: EngineState) -> str:
    """Return the state of an engine's queue as text, as far as it is known.

    An example is `8 requests (6 running, 2 waiting), KV cache 97 %, no token for 41 s`.
    """
    counts = {"running": engine.running, "waiting": engine.waiting}
    known = ", ".join(f"{number:.0f} {name}" for name, number in counts.items() if number is not None)
    text = f"{engine.requests} requests" + (f" ({known})" if known else "")
    if engine.kv_percent is not None:
        text += f", KV cache {engine.kv_percent:.0f} %"
    if engine.still_ns is not None:
        text += f", no token for {duration(engine.still_ns)}"
    if engine.sampled_ns > _STUCK_NS:
        text += f", no answer for {duration(engine.sampled_ns)}"
    return text


def is_stuck(call: Call) -> bool:
    return call.kind == "engine" and call.age_ns >= _STUCK_NS


def remote_call(task: RayCall) -> Call:
    place = "" if task.pid is None else f" (pid {task.pid})"
    return Call(
        kind="actor",
        process=task.actor,
        role=task.method.partition(".")[0],
        stage=task.method,
        age_ns=task.age_ns,
        where=f"{task.state}{place}",
    )


def _missing(call: Call) -> str:
    """Return the known facts on a call's collective: ` (7 of default_pg, without rank 3)`. Empty without
    facts.
    """
    number = "" if call.number is None else f"{call.number} "
    group = "" if call.group is None else f"{number}of {call.group}"
    ranks = few([str(rank) for rank in call.missing], 8)
    noun = "rank" if len(call.missing) == 1 else "ranks"
    parts = [part for part in (group, f"without {noun} {ranks}" if call.missing else "") if part]
    return f" ({', '.join(parts)})" if parts else ""


def say_call(call: Call) -> str:
    """Return a call as text: `actor_rank3_...: actor generate since 312 s, forward at model.py:214`."""
    if call.kind == "actor":
        return f"Ray actor {call.process[:8]}: {call.stage} since {duration(call.age_ns)}, {call.where}"
    if call.kind == "process":
        return f"{call.process}: {call.where}{_behind(call)}"
    if call.kind == "engine":
        return f"{call.process}: engine {call.stage}, {call.where}"
    whose = "" if call.trajectory is None else f" ({turn(call.trajectory, call.turn)})"
    text = f"{call.process}: {call.role} {call.stage}{whose} since {duration(call.age_ns)}"
    if call.alike:
        text += f", with {call.alike:,} younger ones"
    if call.wait == "ray" and not call.waits_for:
        text += ", in Ray for a call that nothing here shows"
    if call.collective is not None:
        text += f", in the collective {call.collective}{_missing(call)}"
    return text + (f", {call.where}" if call.where else "") + _behind(call)


def _behind(call: Call) -> str:
    """Return how far the call's process is behind in collectives; empty if it is not behind.

    An example is `, has begun 118 AllReduce of communicator 0x5f2a; other ranks have begun 119`.
    """
    own = call.behind
    if own is None:
        return ""
    if own.state != "behind":
        return ", and dead for NCCL" if own.state == "dead" else ", and none to NCCL"
    begun = count(own.begun or 0, "collective") if own.op is None else f"{own.begun:,} {own.op}"
    group = own.group if own.group.startswith("communicator") else f"group {own.group}"
    return f", has begun {begun} of {group}; other ranks have begun {own.others:,}"


_RUNNING = "RUNNING"
_MOST_OF_ACTOR = 8
"""Largest number of calls of one actor that are listed."""


class Process:
    """The state of one process, with its spans, tasks and threads by number."""

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        self.key = state.process.key
        self.spans = {span.span: span for span in state.spans}
        self.tasks = {task.id: task for task in state.tasks}
        self.threads = {thread.id: thread for thread in state.threads}
        self.below: dict[int, list[int]] = defaultdict(list)
        """{span: its child spans in this process}."""
        self.tasks_of: dict[int | None, list[Task]] = defaultdict(list)
        for span in state.spans:
            if span.parent is not None:
                self.below[span.parent].append(span.span)
        for task in state.tasks:
            self.tasks_of[task.span].append(task)

    @cached_property
    def blocked(self) -> dict[int, int | None]:
        """{thread whose event loop is blocked: the span that blocks the loop, or None if no span does}."""
        found: dict[int, int | None] = {}
        for thread in self.state.threads:
            if thread.blocks:
                task = None if thread.task is None else self.tasks.get(thread.task)
                found[thread.id] = None if task is None else task.span
        return found

    def calls(self) -> Iterator[OpenSpan]:
        """Yield the innermost spans, and the spans that block an event loop."""
        holders = set(self.blocked.values())
        yield from (s for s in self.state.spans if s.span not in self.below or s.span in holders)

    def leaves(self, tops: Iterable[int]) -> Iterator[int]:
        """Yield the innermost spans below the spans `tops`."""
        rest = list(tops)
        while rest:
            top = rest.pop()
            if top in self.below:
                rest += self.below[top]
            else:
                yield top

    def frames(self, span: OpenSpan) -> tuple[Sequence[Frame], Wait | None]:
        """Return the stack of a span, and what the span waits for (None if its stack shows no wait).

        If the span has tasks, this is the stack of the running task, or else of a task that the others
        wait for. Without tasks, it is the stack of the span's thread, or empty if the thread only runs an
        event loop or another task.
        """
        thread = self.threads.get(span.thread)
        tasks = self.tasks_of[span.span]
        running = None if thread is None else thread.task
        if thread is not None and running is not None and any(task.id == running for task in tasks):
            return thread.frames, _wait_of(thread.frames)
        if tasks:
            ends = [end for end in self._awaited(tasks) if end.span == span.span or end.span is None]
            # Use the task with the deepest stack, because the other tasks await it, or await the same task.
            task = max(ends or tasks, key=lambda task: len(task.frames))
            return task.frames, "ray" if task.awaits == "ObjectRef" else "task"
        if thread is None or _is_polling(thread) or running is not None:
            return (), "task"
        return thread.frames, _wait_of(thread.frames)

    def _awaited(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks at the end of each chain of waits that begins at `tasks`."""
        rest, seen = list(tasks), set[int]()
        while rest:
            task = rest.pop()
            if task.id not in seen:
                seen.add(task.id)
                below = [self.tasks[number] for number in task.awaited if number in self.tasks]
                rest += below
                if not below:
                    yield task

    def awaited_spans(self, span: OpenSpan) -> set[int]:
        """Return the spans of other calls that the tasks of a span wait for, directly or through other
        tasks.
        """
        spans = {task.span for task in self._awaited(self.tasks_of[span.span])}
        return {number for number in spans if number is not None and number != span.span}

    def line(self, span: int) -> Iterator[int]:
        """Yield a span and its ancestors, but stop below an ancestor with several children, because it is
        unknown which child waits for a call that the ancestor has made.
        """
        at: int | None = span
        while at is not None and at in self.spans:
            yield at
            at = self.spans[at].parent
            if at is not None and len(self.below[at]) > 1:
                return


class RayCalls:
    """Open calls of Ray actors. `asker` is the state of the process that asked Ray, usually the driver."""

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
        """Return {id of an actor that does not record: its running calls, or its waiting calls if none
        runs}.
        """
        return {
            actor: ([call for call in calls if call.state == _RUNNING] or calls)[:_MOST_OF_ACTOR]
            for actor, calls in self._of.items()
            if actor not in self._keys
        }

    def called_by(self, process: str) -> set[str]:
        """Return the actors whose calls a process waits for, each by its process' key, or by its id if it
        does not record.

        Args:
            process: `ProcessInfo.key`, or the id of an actor that does not record.
        """
        own = next((actor for actor, key in self._keys.items() if key == process), process)
        actors = set(self._called.get(own, ()))
        if self.asker is not None and process == self.asker.process.key:
            actors |= self._called.get(None, set())
        return {self._keys.get(actor, actor) for actor in actors} - {process}


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's delay behind other ranks, by the collectives that each rank has begun."""

    group: str
    """A process group of torch, or `communicator 0x5f2a` of NCCL."""
    state: Literal["behind", "dead", "silent"]
    """`behind`: the rank has begun fewer collectives. `dead`: NCCL reports the rank as dead. `silent`: NCCL
    has no answer from the rank."""
    op: str | None = None
    """The kind of collective, such as `AllReduce`, or None for all kinds together."""
    begun: int | None = None
    """Number of these collectives that the rank has begun, or None if unknown."""
    others: int | None = None
    """The largest number of these collectives that another rank has begun, or None if unknown."""


Job: TypeAlias = tuple[str, str, "int | None", str]
"""A job of torch.distributed: the run, role and replica of its processes, and the process that started them.
The last element is empty if no two processes of the same run, role and replica have the same rank."""
_Group: TypeAlias = tuple[Job, str, tuple[int, ...]]
"""A process group: the job of its processes, its name, and its ranks."""


class Entered:
    """The collectives that the ranks of each job have entered, by torch's own counts.

    Several jobs of a run may have groups of the same name. If two processes have the same rank in a group,
    the group is ignored.
    """

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self._jobs = jobs_of(states)
        self._last: dict[_Group, dict[int, int]] = defaultdict(dict)
        """{group: {rank: number of the last collective that the rank entered}}."""
        self._mixed: set[_Group] = set()
        """The groups in which two processes have the same rank."""
        self._missing: dict[tuple[_Group, int], tuple[int, ...]] = {}
        for state in states:
            known = state.collectives
            for group in () if known is None else known.groups:
                key, rank = self._group(state, group), rank_of(state) or 0
                if rank in self._last[key]:
                    self._mixed.add(key)
                self._last[key][rank] = group.entered

    def behind(self, state: ProcessState) -> Behind | None:
        """Return how far a process is behind in the group in which it is furthest behind; None if
        the process is not behind in any group.
        """
        known = state.collectives
        found = []
        for group in () if known is None else known.groups:
            key = self._group(state, group)
            most = max(self._last[key].values())
            if most > group.entered and key not in self._mixed:
                begun = max(0, group.entered)
                found.append(Behind(group=group.description, state="behind", begun=begun, others=most))
        return max(found, key=lambda one: (one.others or 0) - (one.begun or 0), default=None)

    def awaited(self, state: ProcessState) -> tuple[PendingCollective | None, tuple[int, ...]]:
        """Return (oldest open collective of a process, ranks that have not entered it). The ranks include
        ranks that do not answer. Without an open collective, return (None, ()).
        """
        own = state.collectives
        if own is None or not own.pending:
            return None, ()
        call = own.pending[0]
        group = next((group for group in own.groups if group.name == call.group), None)
        if group is None:
            return call, ()
        # A send or receive such as `recv 3<-0`, whose ranks are numbers within the group.
        if call.number is None:
            sender = call.op.partition("<-")[2]
            known = call.op.startswith("recv") and sender.isdigit() and int(sender) < len(group.ranks)
            return call, (group.ranks[int(sender)],) if known else ()
        key = self._group(state, group)
        if key in self._mixed:
            return call, ()
        at = key, call.number
        if at not in self._missing:
            last = self._last[key]
            self._missing[at] = tuple(rank for rank in group.ranks if last.get(rank, -1) < call.number)
        return call, self._missing[at]

    def _group(self, state: ProcessState, group: ProcessGroup) -> _Group:
        return self._jobs[state.process.key], group.name, group.ranks


def jobs_of(states: Sequence[ProcessState]) -> dict[str, Job]:
    """Return {process: its job}. The processes of a run, role and replica are one job if their ranks differ.

    If two of these processes have the same rank, there are several jobs. Processes that one process started
    are then a job of their own if they have all ranks. For the other processes, the starting process is left
    empty.
    """
    alike: dict[Job, list[ProcessState]] = defaultdict(list)
    for state in states:
        alike[state.run_id, state.process.role, state.process.replica, ""].append(state)
    jobs: dict[str, Job] = {}
    for job, own in alike.items():
        jobs |= {state.process.key: job for state in own}
        if not has_each_rank_once(own):
            started: dict[str, list[ProcessState]] = defaultdict(list)
            for state in own:
                started[f"{state.process.host} {state.ancestors[:1]}"].append(state)
            parts = {launcher: part for launcher, part in started.items() if _is_whole(part)}
            jobs |= {s.process.key: (*job[:3], launcher) for launcher, part in parts.items() for s in part}
    return jobs


def has_each_rank_once(states: Sequence[ProcessState]) -> bool:
    ranks = [rank for state in states if (rank := rank_of(state)) is not None]
    return len(set(ranks)) == len(ranks)


def _is_whole(states: Sequence[ProcessState]) -> bool:
    """Return whether the states belong to all ranks of one job, each rank once."""
    ranks = {rank_of(state) for state in states}
    return has_each_rank_once(states) and ranks == set(range(states[0].process.world_size or 0))


class Launched:
    """The ranks that are behind in NCCL's communicators, as NCCL's RAS reports.

    Attributes:
        behind: {process: how far it is behind}. A process that did not answer is named as a silent worker, or
            by its rank, pid and host.
        awaited: {process: the processes that it waits for because they are behind}.
    """

    def __init__(self, states: Sequence[ProcessState], silent: Iterable[str]) -> None:
        self.behind: dict[str, Behind] = {}
        self.awaited: dict[str, set[str]] = defaultdict(set)
        self._by_pid: dict[int, list[ProcessState]] = defaultdict(list)
        for state in states:
            self._by_pid[state.process.pid].append(state)
        self._silent = list(silent)
        for state in states:
            for communicator in state.communicators:
                self._read(communicator)

    def _read(self, communicator: Communicator) -> None:
        others = [key for host, pid in communicator.others if (key := self._key(host, pid)) is not None]
        named = [self._key(rank.host, rank.pid) for rank in communicator.ranks]
        if not others and not any(named):
            return  # the communicator belongs to another run on the same hosts
        group = f"communicator {communicator.hash}"
        for rank, known in zip(communicator.ranks, named, strict=True):
            key = known or f"rank {rank.rank} of {group} (pid {rank.pid} on {rank.host})"
            self.behind[key] = Behind(
                group=group,
                state=rank.state,
                op=rank.op or None,
                begun=rank.begun,
                others=rank.others,
            )
            for other in others:
                self.awaited[other].add(key)

    def _key(self, host: str, pid: int) -> str | None:
        """Return the key of a process, or of a worker that did not answer; None if unknown or ambiguous.

        Processes of several hosts may have the same pid, for instance in containers.
        """
        there = [state for state in self._by_pid[pid] if _may_be_at(state, host)]
        known = [state.process.key for state in there]
        known = known or [key for key in self._silent if key.endswith(f"_pid{pid}")]
        return known[0] if len(known) == 1 else None


def _may_be_at(state: ProcessState, host: str) -> bool:
    """Return whether a process may run on `host`, an IP address. NCCL may know only a loopback address."""
    own = state.addresses
    return not own or host in own or host == "unknown" or host.startswith(("127.", "::1"))


def rank_of(state: ProcessState) -> int | None:
    return state.process.rank if state.collectives is None else state.collectives.rank
