"""Inference replicas of a step: their recordings, their processes, and the requests that they served."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import RUNNING_REQUESTS, UNFINISHED_REQUESTS, WAITING_REQUESTS
from stepscope.files.spans import REPLICA, SERVED, WAITING
from stepscope_report.accounting import Pair
from stepscope_report.spans import MOVES_WEIGHTS, ReplicaKey, replica_of, replica_of_process, whole
from stepscope_report.timeline import Span, Timeline, TraceActivity
from stepscope_report.timeline.activity.content import Iteration
from stepscope_report.timeline.model import HeldValue, held_values
from stepscope_report.timeline.tree import CALLERS

_PAUSES = re.compile(r"pause(_generation)?|sleep|release_memory_occupation")
_RESUMES = re.compile(r"(resume|continue)(_generation)?|wake_up|resume_memory_occupation")

Mark: TypeAlias = Literal["pause", "resume", "weights"]
"""Effect of a span on an engine. `weights`: the span loads weights, and the engine is paused meanwhile."""


class Pass(NamedTuple):
    """One forward pass, on the owner's clock."""

    start_ns: int
    end_ns: int
    iteration: Iteration


class Recording(NamedTuple):
    """The recording of one data-parallel engine of a replica: all files of the worker that represents the
    engine.
    """

    passes: list[Pass]
    stretches: list[tuple[int, int]]
    """(start, end) of each file."""
    idle: bool
    """True if the recording has no forward pass and no other work."""


class Tokens(msgspec.Struct):
    """Sums over requests. A sum is None if no request states the number."""

    requests: int | None = None
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    preemptions: int | None = None

    def add(self, field: str, number: int | None) -> None:
        if number is not None:
            setattr(self, field, (getattr(self, field) or 0) + number)


class Replica(msgspec.Struct, kw_only=True):
    """One inference replica, or a process whose requests do not name a replica."""

    name: str
    number: int | None
    processes: list[int] = []
    """Indices in `Timeline.processes`."""
    recordings: list[Recording] = []
    """The recordings of the data-parallel engines, in the order of their ranks."""
    served: list[Span] = []
    """Spans `queue`, `wait`, `prefill` and `decode` of the requests that the replica served."""
    pauses: list[tuple[int, int]] | None = None
    """The stretches in which the replica was paused, or None if unknown."""
    stalls: list[tuple[int, int]] | None = None
    """The stretches in which the engine's own profiler kept the engine from serving, or None if unknown."""
    held: list[tuple[int, int]] | None = None
    """The stretches in which the replica had requests, by the engine's own counters, or None if unknown."""
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    idle: bool = False
    """True if the manifest says that the replica was recorded and ran nothing."""

    @property
    def passes(self) -> list[Pass]:
        return [ran for recording in self.recordings for ran in recording.passes]


_Key = tuple[str, ReplicaKey]
"""(kind, key). The kind `replica` has the key of the replica. The kinds `process` and `requests of` have a
key whose number is the index of the process."""


def find_replicas(timeline: Timeline, activities: Sequence[TraceActivity]) -> list[Replica]:
    """Return the known facts about each replica, numbered replicas first."""
    return _Search(timeline, activities).run()


class _Search:
    def __init__(self, timeline: Timeline, activities: Sequence[TraceActivity]) -> None:
        self._timeline = timeline
        self._recorded: dict[_Key, list[TraceActivity]] = defaultdict(list)
        self._replica_of: dict[int, ReplicaKey] = {}
        """{index of a process: its replica}."""
        for index, process in enumerate(timeline.processes):
            stated = replica_of_process(timeline, process)
            if stated is not None:
                self._replica_of[index] = stated
        for activity in activities:
            if activity.replica is not None:
                recorded = ReplicaKey(activity.replica)
                if activity.process is not None:
                    own = self._replica_of.setdefault(activity.process, recorded)
                    recorded = own if own.number == recorded.number else recorded
                self._recorded["replica", recorded].append(activity)
            elif activity.content.iterations and activity.process is not None:
                self._recorded["process", ReplicaKey(activity.process)].append(activity)
        for index, named in _named_in_spans(timeline).items():
            self._replica_of.setdefault(index, named)
        self._announced = dict(_announced(timeline))
        recordings = {key for kind, key in self._recorded if kind == "replica"}
        self._known = sorted({*self._replica_of.values(), *recordings, *self._announced})
        self._replicas: dict[_Key, Replica] = {}

    def run(self) -> list[Replica]:
        for own in self._known:
            self._replica(("replica", own)).idle = self._announced.get(own, False)
        for index, own in sorted(self._replica_of.items()):
            self._replica(("replica", own)).processes.append(index)
        for key, activities in self._recorded.items():
            self._replica(key).recordings = _recordings(activities)
        marks: dict[_Key, list[tuple[int, int, Mark]]] = defaultdict(list)
        for span in self._timeline.spans:
            if self._timeline.processes[span.process].aligned:
                self._take(span, marks)
        for key, replica_marks in marks.items():
            self._replica(key).pauses = _stretches(replica_marks, self._timeline.window.end_ns)
        self._stall()
        self._count()
        for key, replica in self._replicas.items():
            role = key[1].role if key[0] == "replica" else ""
            replica.held = _held(self._timeline, replica.number, role, self._recorded.get(key, ()))
        order = {"replica": 0, "process": 1, "requests of": 2}
        return [self._replicas[key] for key in sorted(self._replicas, key=lambda key: (order[key[0]], key))]

    def _replica(self, key: _Key) -> Replica:
        if key not in self._replicas:
            kind, own = key
            if kind == "replica":
                made = Replica(name=own.name, number=own.number)
            else:
                name = self._timeline.processes[own.number].name
                made = Replica(name=name if kind == "process" else f"requests of {name}", number=None)
                made.processes.append(own.number)
            self._replicas[key] = made
        return self._replicas[key]

    def _take(self, span: Span, marks: dict[_Key, list[tuple[int, int, Mark]]]) -> None:
        if span.role == "rollout" and span.stage in SERVED | WAITING:
            self._replica(self._owner_of(span)).served.append(span)
            return
        mark = mark_of(span)
        key = None if mark is None else self._owner_of(span)
        if mark is not None and key is not None and key[0] != "requests of":
            marks[key].append((span.start_ns, self._timeline.until_ns(span), mark))

    def _stall(self) -> None:
        parts = self._timeline.manifest.processes if self._timeline.manifest is not None else ()
        artifacts = [artifact for part in parts for item in part.expected for artifact in item.artifacts]
        for number in {
            artifact.replica for artifact in artifacts if artifact.replica is not None and artifact.stalls
        }:
            stalls = [stall for stall in self._timeline.stalls if stall.replica == number]
            self._replica(("replica", ReplicaKey(number))).stalls = [
                (stall.start_ns, stall.end_ns) for stall in stalls
            ]

    def _count(self) -> None:
        counted = _count_requests(self._timeline, self._owner_of)
        read = {key: _count_between(activities) for key, activities in self._recorded.items()}
        several = Counter(map(msgspec.structs.astuple, read.values()))
        for key in {*counted, *self._replicas}:
            replica = self._replica(key)
            replica.tokens = counted.get(key) or _count_phases(replica.served)
            engine = read.get(key, Tokens())
            # Engines of one process share its counters, which do not describe a single engine.
            if replica.tokens == Tokens() and several[msgspec.structs.astuple(engine)] == 1:
                replica.tokens = engine

    def _owner_of(self, span: Span) -> _Key:
        """Return the key of the replica that served a request."""
        own, index = replica_of(self._timeline, span), span.process
        if own is not None or index in self._replica_of:
            return "replica", own or self._replica_of[index]
        process, place = self._timeline.processes[index], ReplicaKey(index)
        if process.is_replica or ("process", place) in self._recorded:
            return "process", place
        if len(self._known) == 1:
            return "replica", self._known[0]
        calls = self._known or process.owner or process.info.role in CALLERS
        return "requests of" if calls else "process", place


def _named_in_spans(timeline: Timeline) -> dict[int, ReplicaKey]:
    """Return {process: replica} for processes whose spans `prefill` and `decode` all name the same replica.

    Other spans of the process, such as `queue`, need not name the replica.
    """
    stated: dict[int, set[ReplicaKey | None]] = defaultdict(set)
    for span in timeline.spans:
        if span.role == "rollout" and span.stage in SERVED and timeline.processes[span.process].is_replica:
            own = None if whole(span, REPLICA) is None else replica_of(timeline, span)
            stated[span.process].add(own)
    return {
        index: replica
        for index, replicas in stated.items()
        for replica in replicas
        if replica is not None and len(replicas) == 1
    }


def mark_of(span: Span) -> Mark | None:
    """Return the effect of a span on its engine, or None if the span has no effect on an engine."""
    if span.role != "rollout":
        return None
    if _PAUSES.fullmatch(span.stage):
        return "pause"
    if _RESUMES.fullmatch(span.stage):
        return "resume"
    return "weights" if MOVES_WEIGHTS.search(span.stage) else None


def _announced(timeline: Timeline) -> Iterator[tuple[ReplicaKey, bool]]:
    """Yield (key of a replica, True if the replica ran nothing) for each engine that a capture expected."""
    for part in timeline.manifest.processes if timeline.manifest is not None else ():
        for item in part.expected:
            number = item.name.rpartition(" ")[2]
            if part.owner and item.kind == "engine" and number.isdecimal():
                yield ReplicaKey(int(number)), item.idle


def _recordings(activities: Iterable[TraceActivity]) -> list[Recording]:
    """Return one recording for each data-parallel engine.

    Workers of one engine (tensor and pipeline parallel) run the same passes: the worker that recorded the
    most passes represents all workers. Files of one worker are parts of its recording, by stage or by time.
    """
    workers: dict[tuple[str, int, str, int], list[TraceActivity]] = defaultdict(list)
    for activity in activities:
        if activity.unaligned is None:
            info, place = activity.info, sorted((activity.topology or {}).items())
            rank = -1 if info.rank is None else info.rank
            workers[info.host, info.pid, str(place), rank].append(activity)
    engines: dict[int, list[Recording]] = defaultdict(list)
    worlds: Counter[int | None] = Counter()
    for _, files in sorted(workers.items()):
        recording = _of_worker(files)
        dp = (files[0].topology or {}).get("dp")
        if dp is None:
            stated = files[0].content.distributed
            if stated is not None:
                # Processes with the same rank are in different worlds: each data-parallel engine has its own.
                dp = worlds[stated.rank]
                worlds[stated.rank] += 1
        engines[dp or 0].append(recording)
    return [_merged(engines[dp]) for dp in sorted(engines)]


def _of_worker(files: Iterable[TraceActivity]) -> Recording:
    passes: dict[tuple[int, int, int, int], Pass] = {}
    """The passes by key: two files may hold the same pass."""
    stretches, idle = [], True
    for file in files:
        content = file.content
        for iteration in content.iterations:
            start_ns = file.unix_ns(iteration.start_us)
            end_ns = file.unix_ns(iteration.start_us + iteration.dur_us)
            key = start_ns, end_ns, iteration.prefills, iteration.decodes
            passes[key] = Pass(start_ns, end_ns, iteration)
        if content.first_us is not None and content.last_us is not None:
            stretches.append((file.unix_ns(content.first_us), file.unix_ns(content.last_us)))
        idle = idle and not content.operators and not content.kernels and not content.problems
    return Recording([passes[key] for key in sorted(passes)], stretches, idle and not passes)


def _merged(workers: Sequence[Recording]) -> Recording:
    """Return the recording of the worker with the most passes, marked idle only if all workers were idle."""
    fullest = max(workers, key=lambda worker: len(worker.passes))
    return fullest._replace(idle=all(worker.idle for worker in workers))


_FACTS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "preemptions": "preemptions",
}
"""{attribute that `record_request` sets on a request's span: field of `Tokens` for the sum of its values}."""
_PHASE_FACTS = {"prefill": "prompt", "decode": "output"}
"""{stage: field of `Tokens` for the sum of `tokens` of the stage's spans, if no request states the
number}."""
_REQUESTS_AT_ENDS = tuple(
    f"requests_{queue}_at_{when}" for queue in ("running", "waiting") for when in ("start", "stop")
)
"""Names of the numbers of requests that an adapter reads at the start and at the stop of a recording."""
_COUNTERS = {"prompt_tokens": "prompt", "generation_tokens": "output", "preemptions": "preemptions"}
"""{counter that an adapter reads at the start and at the stop: field of `Tokens` for the counter's
growth}."""


def _count_requests(timeline: Timeline, owner_of: Callable[[Span], _Key]) -> dict[_Key, Tokens]:
    """Return the sums over the requests that state their tokens, by replica."""
    stated = [index for index, span in enumerate(timeline.spans) if _is_request(span)]
    around = set[int]()
    for index in stated:
        above = timeline.spans[index].parent
        while above is not None and above not in around:
            around.add(above)
            above = timeline.spans[above].parent
    sums: dict[_Key, Tokens] = defaultdict(Tokens)
    for index in stated:
        if index not in around:  # a span around requests states the same tokens again, or their sum
            span = timeline.spans[index]
            tokens = sums[owner_of(span)]
            tokens.add("requests", 1)
            for name, field in _FACTS.items():
                tokens.add(field, _number(span.attrs or {}, name))
    return sums


def _is_request(span: Span) -> bool:
    attrs = span.attrs or {}
    own = "request_id" in attrs or span.role == "rollout"
    return own and any(_number(attrs, name) is not None for name in ("prompt_tokens", "output_tokens"))


def _count_phases(served: Iterable[Span]) -> Tokens:
    """Return the sums of `tokens` on spans `prefill` and `decode`, for engines that record nothing else. Each
    ended span `decode` counts as a request.
    """
    tokens = Tokens()
    for span in served:
        field = _PHASE_FACTS.get(span.stage)
        if field is not None:
            tokens.add(field, _number(span.attrs or {}, "tokens"))
    decodes = sum(span.stage == "decode" and span.end_ns is not None for span in served)
    tokens.requests = decodes or None
    return tokens


def _count_between(activities: Iterable[TraceActivity]) -> Tokens:
    """Return the growth of the engine's own counters during its recording."""
    tokens = Tokens()
    servers = {str(activity.options.get("server")): activity.options for activity in activities}
    for options in servers.values():
        for name, field in _COUNTERS.items():
            before, after = (_number(options, f"{name}_at_{when}") for when in ("start", "stop"))
            if before is not None and after is not None and after >= before:
                tokens.add(field, after - before)
    return tokens


def _held(
    timeline: Timeline, number: int | None, role: str, activities: Iterable[TraceActivity]
) -> list[tuple[int, int]] | None:
    """Return the stretches in which an engine had requests, by its counters. None if the counters
    are unknown.

    Without samples, the result is empty if the scheduler had no requests at the start and at the stop of the
    recording.
    """
    sampled = None if number is None else _requests_held(timeline, number, role)
    ends = [_number(activity.options, name) for activity in activities for name in _REQUESTS_AT_ENDS]
    if sampled is None and ends and not any(ends) and None not in ends:
        return []
    return sampled


def _number(attrs: Mapping[str, object], name: str) -> int | None:
    value = attrs.get(name)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole and not isinstance(value, bool) else None  # type: ignore[call-overload]  # checked


def _stretches(marks: Iterable[tuple[int, int, Mark]], until_ns: int) -> list[tuple[int, int]]:
    """Return the stretches in which a replica was paused. A stretch lasts from the start of a pause to the
    end of the next resume, or to `until_ns`; or it is a span that loads weights.
    """
    stretches: list[tuple[int, int]] = []
    since_ns: int | None = None
    for start_ns, end_ns, mark in sorted(marks):
        if mark == "pause":
            since_ns = start_ns if since_ns is None else since_ns
        elif mark == "resume" and since_ns is not None:
            stretches.append((since_ns, end_ns))
            since_ns = None
        else:
            stretches.append((start_ns, end_ns))
    return stretches if since_ns is None else [*stretches, (since_ns, until_ns)]


def _requests_held(timeline: Timeline, number: int, role: str) -> list[Pair] | None:
    """Return the stretches in which a replica had requests. None if no counter of its requests was sampled.

    The counter of unanswered requests in the replica's front end is preferred, because that counter
    includes requests that have not reached the scheduler. The last value holds until the end of the step.

    Args:
        number: Number of the replica.
        role: Role of the processes that sample the counter, or empty if only one role has a replica of
            that number.
    """
    own = [
        counter
        for counter in timeline.counters
        if f"{counter.of} ".startswith(f"replica {number} ")
        and timeline.processes[counter.process].aligned
        and role in ("", timeline.processes[counter.process].info.role)
    ]
    named = [counter for counter in own if counter.name == UNFINISHED_REQUESTS]
    sampled = named or [counter for counter in own if counter.name in (RUNNING_REQUESTS, WAITING_REQUESTS)]
    if not sampled:
        return None
    pieces = [piece for counter in sampled for piece in held_values(counter, timeline)]
    end_ns = timeline.window.end_ns
    pieces += [HeldValue(counter.times_ns[-1], end_ns, counter.values[-1]) for counter in sampled]
    return [
        (piece.start_ns, piece.end_ns) for piece in pieces if piece.value and piece.start_ns < piece.end_ns
    ]
