"""Reads the parts that a replay needs from a step's timeline."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from typing import NamedTuple

import msgspec

from stepscope.errors import RecordError
from stepscope.files.spans import SERVED, WAITING
from stepscope_report.spans import MOVES_WEIGHTS, above, is_tool, replica_of, whole
from stepscope_report.timeline import Span, Timeline
from stepscope_report.timeline.passes import (
    RequestKey,
    linked_requests,
    pass_of_rows,
    passes_of_requests,
)
from stepscope_report.whatif import (
    Call,
    CallKind,
    DriverStage,
    Phase,
    Rollout,
    StageKind,
    Step,
    Trajectory,
    slots_of_passes,
    slots_of_replicas,
    tool_pool,
    trajectories_at_once,
)
from stepscope_report.whatif.curve import measured

_BESIDE = 0.03
"""Largest share of the step that the driver may spend in other stages while trajectories run."""
_REWARD = re.compile(r"reward|score", re.IGNORECASE)
_REST = "between stages"
"""Name of the stage for time in which the driver is in no stage."""
TRAJECTORY = "trajectory"
"""Name of the stage of the span around a trajectory."""
UNKNOWN = "unknown"
"""Name of the replica of calls whose spans name no replica."""
_SAME_CALL_NS = 1_000_000
"""Longest gap in ns between two spans that count as phases of one call."""
_LINKED = 0.95
"""Smallest share of generations with recorded passes for which the passes give the curve."""


def read_step(timeline: Timeline) -> Step:
    """Return the parts of the step that a replay needs.

    Raises:
        RecordError: the step has no trajectories, no trajectory generates, or the step consumes none.
    """
    rollout = _Reading(timeline).rollout()
    before, after = _driver_stages(timeline, rollout.start_ns, rollout.start_ns + rollout.wall_ns)
    return Step(
        number=timeline.step,
        run_id=timeline.run_id,
        wall_ns=timeline.window.wall_ns,
        before=before,
        rollout=rollout,
        after=after,
    )


class _Request(NamedTuple):
    """A request with recorded passes, on the owner's clock."""

    start_ns: int
    """Time at which the request arrived in the engine; if unknown, the start of the request's first pass."""
    begin_ns: int
    """Start of the request's first pass."""
    end_ns: int
    tokens: int
    replica: int


class _Reading:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._below = defaultdict[int, list[int]](list)
        self._members = defaultdict[str, list[int]](list)
        roots: dict[str, int] = {}
        for index, span in enumerate(timeline.spans):
            if span.parent is not None:
                self._below[span.parent].append(index)
            if span.trajectory is not None and timeline.processes[span.process].aligned:
                self._members[span.trajectory].append(index)
                if span.stage == TRAJECTORY and (timeline.consumes(span) or timeline.leaves(span)):
                    roots[span.trajectory] = index
        self._roots = sorted(roots.values(), key=lambda index: timeline.spans[index].start_ns)
        self._replicas: dict[str, int] = {}
        self._numbers = count()
        self._requests = defaultdict[int, list[RequestKey]](list)
        """Requests that each span names, by index of the span."""
        for key, index in linked_requests(timeline).items():
            self._requests[index].append(key)
        self._rows = [passes_of_requests(engine) for engine in timeline.passes]
        self._passes = [pass_of_rows(engine) for engine in timeline.passes]
        self._noted = 0
        """Number of generations whose requests have recorded passes."""

    def rollout(self) -> Rollout:
        spans = [self._timeline.spans[root] for root in self._roots]
        consumed = [span for span in spans if self._is_awaited(span)]
        self._check(consumed)
        start_ns = consumed[0].start_ns
        trajectories = tuple(self._trajectory(root, start_ns) for root in self._roots)
        if not self._replicas:
            raise RecordError(
                f"step {self._timeline.step}: no trajectory has a span of role `rollout`, so there is no "
                "generation to replay. Fix: record each call of an engine as span('generate', role='rollout')"
            )
        pool, trajectories = tool_pool(trajectories)
        generations = [call for trajectory in trajectories for call in trajectory.generations()]
        engines = self._timeline.passes if self._noted >= _LINKED * len(generations) else ()
        if len({engine.replica for engine in engines}) < len(engines):
            engines = ()  # the load of a replica is the sum over its engines
        curve = None if any(engine.noted.dropped for engine in engines) else measured(engines)
        return Rollout(
            start_ns=start_ns,
            trajectories=trajectories,
            replicas=tuple(self._replicas),
            tool_pool=pool,
            at_once=trajectories_at_once(trajectories),
            slots=slots_of_passes(engines) or slots_of_replicas(generations),
            curve=() if curve is None else curve.points,
            larger=() if curve is None else curve.larger,
        )

    def _check(self, roots: Sequence[Span]) -> None:
        step, window = self._timeline.step, self._timeline.window
        if not roots and any(span.stage == TRAJECTORY for span in self._timeline.spans):
            raise RecordError(
                f"step {step}: a replay needs trajectories that began in this step, in processes whose "
                "clocks are aligned, and it has others alone"
            )
        if not roots:
            raise RecordError(
                f"step {step} has no trajectories, which a replay needs. Fix: record each with "
                "trajectory(name)"
            )
        if any(root.end_ns is None for root in roots):
            raise RecordError(f"step {step}: a trajectory never ended, so the step has no length to replay")
        early = sum(root.start_ns < window.start_ns for root in roots)
        resumed = self._resumed()
        if early or resumed:
            raise RecordError(
                f"step {step}: {early + resumed} of {len(roots) + resumed} trajectories began before the "
                "step. Only steps that wait for a rollout of their own can be replayed"
            )

    def _resumed(self) -> int:
        """Return the number of trajectories that `consume` named and that began in an earlier step."""
        if self._timeline.taken is None:
            return 0
        begun = {self._timeline.spans[root].trajectory for root in self._roots}
        return len((self._members.keys() & self._timeline.taken) - begun)

    def _trajectory(self, root: int, begin_ns: int) -> Trajectory:
        span = self._timeline.spans[root]
        calls = sorted(self._calls(root, begin_ns), key=lambda call: (call.start_ns, call.number))
        phases, until_ns = _phases(calls, span.start_ns - begin_ns)
        end_ns = max(self._timeline.until_ns(span) - begin_ns, until_ns)
        return Trajectory(
            name=span.trajectory or "",
            start_ns=span.start_ns - begin_ns,
            end_ns=end_ns,
            phases=phases,
            rest_ns=end_ns - until_ns,
            consumed=self._is_awaited(span),
        )

    def _is_awaited(self, root: Span) -> bool:
        return self._timeline.consumes(root) and not root.cancelled

    def _calls(self, root: int, begin_ns: int) -> Iterator[Call]:
        around = self._timeline.spans[root]
        for indices in self._grouped(root):
            first, last = self._timeline.spans[indices[0]], self._timeline.spans[indices[-1]]
            kind = _kind(first)
            start_ns = max(first.start_ns, around.start_ns)
            end_ns = min(self._timeline.until_ns(last), self._timeline.until_ns(around))
            if kind is None or start_ns >= end_ns:
                continue
            generates = kind == "generate"
            noted = self._requests_of(indices) if generates else []
            self._noted += bool(noted)
            waited_ns = 0 if kind == "reward" else self._waited(indices, end_ns - start_ns)
            queued_ns = max((request.begin_ns - request.start_ns for request in noted), default=0)
            yield Call(
                number=next(self._numbers),
                kind=kind,
                start_ns=start_ns - begin_ns,
                end_ns=end_ns - begin_ns,
                wait_ns=waited_ns or min(queued_ns, end_ns - start_ns),
                replica=self._replica_of(indices, noted) if generates else None,
                tokens=self._tokens(indices) if generates else None,
            )
        yield from self._calls_without_spans(root, begin_ns)

    def _calls_without_spans(self, root: int, begin_ns: int) -> Iterator[Call]:
        """Yield the requests that a turn of a trajectory names, if they have no span of a call."""
        around = self._timeline.spans[root]
        for index in self._members[around.trajectory or ""]:
            if _kind(self._timeline.spans[index]) is not None or self._is_inside(index):
                continue
            for key in self._requests[index]:
                request = self._request(key)
                start_ns = max(request.start_ns, around.start_ns)
                end_ns = min(request.end_ns, self._timeline.until_ns(around))
                if start_ns < end_ns:
                    self._noted += 1
                    name = f"replica {request.replica}"
                    yield Call(
                        number=next(self._numbers),
                        kind="generate",
                        start_ns=start_ns - begin_ns,
                        end_ns=end_ns - begin_ns,
                        wait_ns=min(max(0, request.begin_ns - start_ns), end_ns - start_ns),
                        replica=self._replicas.setdefault(name, len(self._replicas)),
                        tokens=request.tokens or None,
                    )

    def _requests_of(self, indices: Iterable[int]) -> list[_Request]:
        """Return the recorded requests that are named by a call's spans or by spans below them."""
        inner = [below for index in indices for below in self._indices(index)]
        return [self._request(key) for index in inner for key in self._requests[index]]

    def _request(self, key: RequestKey) -> _Request:
        engine, rows = self._timeline.passes[key.engine], self._rows[key.engine][key.request]
        served = [self._passes[key.engine][row] for row in rows]
        if not served:
            return _Request(0, 0, 0, 0, engine.replica)
        begin_ns, end_ns = engine.begins_ns[served[0]], engine.ends_ns[served[-1]]
        arrived_ns = engine.noted.requests.arrived_ns[key.request]
        queued_ns = 0 if arrived_ns is None else engine.noted.passes.begin_ns[served[0]] - arrived_ns
        tokens = sum(engine.noted.served.output[row] for row in rows)
        return _Request(begin_ns - max(0, queued_ns), begin_ns, end_ns, tokens, engine.replica)

    def _grouped(self, root: int) -> list[list[int]]:
        """Return the outermost calls of a trajectory, each as a list of its spans: the phases of one request
        are one call.
        """
        spans = self._timeline.spans
        outermost = [
            index
            for index in self._members[spans[root].trajectory or ""]
            if _kind(spans[index]) is not None and not self._is_inside(index)
        ]
        groups: list[list[int]] = []
        for index in sorted(outermost, key=lambda index: spans[index].start_ns):
            if groups and _continues(spans[groups[-1][-1]], spans[index]):
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _is_inside(self, index: int) -> bool:
        """Return True if a span above the span `index`, within the trajectory, is a call."""
        outer = above(self._timeline, self._timeline.spans[index])
        around = takewhile(lambda span: span.stage != TRAJECTORY, outer)
        return any(_kind(span) is not None for span in around)

    def _indices(self, index: int) -> Iterator[int]:
        """Yield the indices of a span and of all spans below it."""
        todo = [index]
        while todo:
            inner = todo.pop()
            yield inner
            todo += self._below[inner]

    def _inside(self, index: int) -> Iterator[Span]:
        """Yield a span and all spans below it."""
        return (self._timeline.spans[inner] for inner in self._indices(index))

    def _waited(self, indices: Iterable[int], most_ns: int) -> int:
        inner = (span for index in indices for span in self._inside(index))
        return min(sum(span.dur_ns or 0 for span in inner if span.waits), most_ns)

    def _tokens(self, indices: Iterable[int]) -> int | None:
        inner = [span for index in indices for span in self._inside(index)]
        written = [whole(span, "output_tokens") for span in inner]
        if not any(written):
            written = [whole(span, "tokens") for span in inner if span.stage == "decode"]
        if not any(written):
            written = [whole(self._timeline.spans[index], "tokens") for index in indices]
        return max((tokens for tokens in written if tokens is not None and tokens > 0), default=None)

    def _replica_of(self, indices: Iterable[int], noted: Iterable[_Request]) -> int:
        names = [self._replica_name(index) for index in indices]
        names += (f"replica {request.replica}" for request in noted)
        name = next((name for name in names if name != UNKNOWN), UNKNOWN)
        return self._replicas.setdefault(name, len(self._replicas))

    def _replica_name(self, index: int) -> str:
        for span in self._inside(index):
            replica = replica_of(self._timeline, span)
            if replica is not None:
                return replica.name
        processes = (self._timeline.processes[span.process] for span in self._inside(index))
        return next((process.name for process in processes if process.is_replica), UNKNOWN)


def _kind(span: Span) -> CallKind | None:
    if span.stage == TRAJECTORY:
        return None
    if span.role == "rollout":
        return "generate"
    if is_tool(span.role, span.stage):
        return "tool"
    return "reward" if span.role == "reward" else None


def _continues(before: Span, after: Span) -> bool:
    """Return True if `after` continues the call of `before`: the next phase of a request, or the work after a
    wait.
    """
    gap_ns = after.start_ns - (before.end_ns or 0)
    if before.parent != after.parent or not 0 <= gap_ns < _SAME_CALL_NS:
        return False
    if _kind(before) == _kind(after) and before.waits:
        return True
    request = before.role == after.role == "rollout" and {before.stage, after.stage} <= SERVED | WAITING
    return request and before.stage != "decode"


def _phases(calls: Iterable[Call], begin_ns: int) -> tuple[tuple[Phase, ...], int]:
    """Return (phases of calls, end of the last phase in ns). Calls that overlap are in one phase."""
    phases: list[Phase] = []
    group: list[Call] = []
    until_ns = from_ns = begin_ns
    for call in calls:
        if group and call.start_ns >= until_ns:
            phases.append(_phase(group, from_ns))
            group, from_ns = [], until_ns
        group.append(call)
        until_ns = max(until_ns, call.end_ns)
    if group:
        phases.append(_phase(group, from_ns))
    return tuple(phases), until_ns


def _phase(calls: Sequence[Call], after_ns: int) -> Phase:
    first_ns = calls[0].start_ns
    placed = (msgspec.structs.replace(call, offset_ns=call.start_ns - first_ns) for call in calls)
    return Phase(first_ns - after_ns, tuple(placed))


def _driver_stages(
    timeline: Timeline, begin_ns: int, end_ns: int
) -> tuple[list[DriverStage], list[DriverStage]]:
    """Return (driver's stages before the rollout, stages after it), including the time between stages.

    Args:
        begin_ns: Start of the rollout.
        end_ns: End of the rollout.

    Raises:
        RecordError: a stage of the driver runs at the same time as the rollout.
    """
    spans = list(_stages(timeline, begin_ns, end_ns))
    _check(timeline, spans, begin_ns, end_ns)
    window = timeline.window
    return _cut(spans, window.start_ns, begin_ns), _cut(spans, end_ns, max(window.end_ns, end_ns))


def _stages(timeline: Timeline, begin_ns: int, end_ns: int) -> Iterator[Span]:
    """Yield the outermost spans of the driver. A span that contains the rollout and more is replaced by the
    spans below it.
    """
    below: dict[int | None, list[int]] = {}
    for index, span in enumerate(timeline.spans):
        if timeline.processes[span.process].owner and span.trajectory is None:
            below.setdefault(span.parent, []).append(index)
    todo = list(reversed(below.get(None, [])))
    while todo:
        index = todo.pop()
        span = timeline.spans[index]
        around = span.start_ns <= begin_ns and timeline.until_ns(span) >= end_ns
        if around and index in below:
            todo += reversed(below[index])
        elif not around:
            yield span


def _check(timeline: Timeline, spans: Iterable[Span], begin_ns: int, end_ns: int) -> None:
    for span in spans:
        beside_ns = min(timeline.until_ns(span), end_ns) - max(span.start_ns, begin_ns)
        covers = beside_ns >= 0.9 * (end_ns - begin_ns)
        if not covers and not span.waits and beside_ns > _BESIDE * timeline.window.wall_ns:
            raise RecordError(
                f"step {timeline.step}: {span.role} {span.stage} runs beside the rollout. Only steps whose "
                "training waits for all trajectories can be replayed"
            )


def _cut(spans: Sequence[Span], from_ns: int, until_ns: int) -> list[DriverStage]:
    stages: list[DriverStage] = []
    at_ns, rest_ns = from_ns, 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        start_ns, end_ns = max(span.start_ns, at_ns), min(span.end_ns or until_ns, until_ns)
        if start_ns < end_ns:
            rest_ns += start_ns - at_ns
            stages.append(DriverStage(f"{span.role} {span.stage}", _stage_kind(span), end_ns - start_ns))
            at_ns = end_ns
    rest_ns += max(0, until_ns - at_ns)
    return [*stages, DriverStage(_REST, "other", rest_ns)] if rest_ns else stages


def _stage_kind(span: Span) -> StageKind:
    if MOVES_WEIGHTS.search(span.stage):
        return "weights"
    return "reward" if span.role == "reward" or _REWARD.search(span.stage) else "train"
