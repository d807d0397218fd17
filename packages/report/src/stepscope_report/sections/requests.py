"""*Requests*: each request of a step, with its turn, its forward passes, and the versions of the weights that
wrote its tokens, for `--json` and Parquet.

The turns of trajectories, with their time by the work of the engine, are computed here too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope_report.formatting import percent_of
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.sections.staleness import trained_under
from stepscope_report.spans import MOVES_WEIGHTS, above
from stepscope_report.table import Block, TextTable
from stepscope_report.timeline import Span, Timeline
from stepscope_report.timeline.model import EnginePasses
from stepscope_report.timeline.passes import (
    RequestKey,
    linked_requests,
    pass_of_rows,
    passes_of_requests,
)

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

FEW = 4
"""A pass with fewer requests than this counts as small."""
_AFTER_NS = 1_000_000_000
"""Largest time in ns between the end of a weight sync and the engine's record of new weights. After a longer
time, the new weights are not attributed to the sync."""


class TokenLag(msgspec.Struct, frozen=True, kw_only=True):
    versions: int
    """Version of the weights that are trained with the tokens, minus the version that wrote the tokens."""
    tokens: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an engine that recorded its passes."""

    replica: int
    dp: int
    """Number of the data-parallel engine within its replica."""
    id: str
    """The engine's id of the request."""
    trajectory: str | None
    """Trajectory whose turn names the request. None if no span names the request."""
    turn: int | None
    start_ns: int | None
    """Start of the request's first pass in ns after the capture opened. None if the request ran in no
    recorded pass."""
    queued_ns: int | None
    """Time in the engine's queue before the first pass, in ns. None if the request arrived before recording
    began."""
    wall_ns: int
    """Time from the start of the request's first pass to the end of its last pass, in ns."""
    passes: int
    computed: int
    """Tokens that the passes computed for the request: prompt tokens and output tokens."""
    tokens: int
    """Output tokens of the request."""
    preemptions: int
    version_begun: int | str | None
    """Version of the weights at the first pass. If no version is known, `update 3` stands for the weights
    after the engine's third update. None if updates were not counted either."""
    version_ended: int | str | None
    """Version of the weights at the last pass, in the form of `version_begun`. None if unknown."""
    trained_by: int | None
    """Number of the step that trains on the request's trajectory. None if unknown."""
    lags: tuple[TokenLag, ...]
    """Output tokens by the age, in versions, of the weights that wrote the tokens. Empty if a version is
    unknown."""


class _Weights(NamedTuple):
    """Changes of one engine's weights: `versions[i]` holds from `at_ns[i]` on. A version is None
    if unknown.
    """

    at_ns: Sequence[int]
    versions: Sequence[int | str | None]

    def place(self, ns: int) -> int:
        """Return the index of the version at a time, or -1 before the first change."""
        return bisect_right(self.at_ns, ns) - 1


def step_requests(timeline: Timeline) -> tuple[Request, ...]:
    """Return the requests of a step, by replica and engine. Empty if no engine recorded its passes."""
    links = linked_requests(timeline)
    under = trained_under(timeline) if timeline.passes else {}
    rows = []
    for at, engine in enumerate(timeline.passes):
        weights, passes = _weights_of(timeline, engine), pass_of_rows(engine)
        lost = Counter(engine.noted.preempted.request)
        for request, own in enumerate(passes_of_requests(engine)):
            index = links.get(RequestKey(at, request))
            span = None if index is None else timeline.spans[index]
            reading = _Reading(timeline, engine, request, span, own, [passes[row] for row in own])
            rows.append(reading.request(weights, lost[request], under))
    return tuple(rows)


class _Reading(NamedTuple):
    timeline: Timeline
    engine: EnginePasses
    number: int
    span: Span | None
    rows: Sequence[int]
    passes: Sequence[int]

    def request(self, weights: _Weights, lost: int, under: Mapping[str, int | None]) -> Request:
        engine, noted, span, passes = self.engine, self.engine.noted, self.span, self.passes
        begin_ns = engine.begins_ns[passes[0]] if passes else None
        arrived_ns = noted.requests.arrived_ns[self.number]
        trajectory = None if span is None else span.trajectory
        versions, requests = self._versions(weights), noted.requests
        trained = None if trajectory is None else under.get(trajectory)
        return Request(
            replica=engine.replica,
            dp=noted.dp,
            id=noted.requests.id[self.number],
            trajectory=trajectory,
            turn=None if span is None else span.turn,
            start_ns=None if begin_ns is None else begin_ns - self.timeline.window.start_ns,
            queued_ns=max(0, noted.passes.begin_ns[passes[0]] - arrived_ns)
            if passes and arrived_ns is not None
            else None,
            wall_ns=0 if begin_ns is None else engine.ends_ns[passes[-1]] - begin_ns,
            passes=len(passes),
            computed=sum(noted.served.tokens[row] for row in self.rows),
            tokens=sum(noted.served.output[row] for row in self.rows),
            preemptions=lost,
            version_begun=_told(versions[:1], requests.updates_begun, self.number),
            version_ended=_told(versions[-1:], requests.updates_ended, self.number),
            trained_by=self._trained_by(),
            lags=tuple(self._lags(versions, trained)),
        )

    def _versions(self, weights: _Weights) -> list[int | str | None]:
        """Return the version of the weights at each of the request's passes. A version is None if unknown.

        If neither the engine nor a weight sync states the version at the first pass, the version in the
        request's spans is used until the weights change.
        """
        places = [weights.place(self.engine.begins_ns[at]) for at in self.passes]
        known = [None if place < 0 else weights.versions[place] for place in places]
        begun = self._of_spans() if known and known[0] is None else None
        return [
            begun if version is None and place == places[0] else version
            for version, place in zip(known, places, strict=True)
        ]

    def _of_spans(self) -> int | None:
        if self.span is None:
            return None
        around = (self.span, *above(self.timeline, self.span))
        return next((span.policy_version for span in around if span.policy_version is not None), None)

    def _trained_by(self) -> int | None:
        span, step = self.span, self.timeline.step
        if span is None or span.trajectory is None:
            return None
        if self.timeline.consumes(span):
            return step
        return None if span.step == step else span.step

    def _lags(self, versions: Sequence[int | str | None], trained: int | None) -> Iterator[TokenLag]:
        numbers = [version for version in versions if isinstance(version, int)]
        if trained is None or len(numbers) < len(versions):
            return
        tokens = Counter[int]()
        for row, version in zip(self.rows, numbers, strict=True):
            tokens[trained - version] += self.engine.noted.served.output[row]
        for lag, number in sorted(tokens.items()):
            if number:
                yield TokenLag(versions=lag, tokens=number)


def _told(
    versions: Sequence[int | str | None], updates: Sequence[int | None] | None, request: int
) -> int | str | None:
    told, number = next(iter(versions), None), None if updates is None else updates[request]
    return f"update {number}" if told is None and number is not None else told


def _weights_of(timeline: Timeline, engine: EnginePasses) -> _Weights:
    """Return the changes of an engine's weights, with the versions that the engine or a weight sync states.

    If the engine recorded no change, each version that weight syncs state counts as a change, at the end of
    the last sync with that version.
    """
    noted = engine.noted
    shift_ns = noted.anchor.wall_ns - noted.anchor.mono_ns
    if engine.begins_ns:
        shift_ns = engine.begins_ns[0] - noted.passes.begin_ns[0]
    syncs = [
        (span.start_ns, timeline.until_ns(span), span.policy_version)
        for span in timeline.spans
        if span.policy_version is not None and MOVES_WEIGHTS.search(span.stage)
    ]
    at_ns = [ns + shift_ns for ns in noted.weights.at_ns]
    versions = [_number(version) for version in noted.weights.version]
    if not at_ns:
        ends_ns: dict[int, int] = {}
        for _, end_ns, version in syncs:
            ends_ns[version] = max(ends_ns.get(version, 0), end_ns)
        changes = sorted((end_ns, version) for version, end_ns in ends_ns.items())
        return _Weights([end_ns for end_ns, _ in changes], [version for _, version in changes])
    stated = [
        version if version is not None else _of_syncs(ns, syncs)
        for ns, version in zip(at_ns, versions, strict=True)
    ]
    return _Weights(at_ns, stated)


def _of_syncs(ns: int, syncs: Sequence[tuple[int, int, int]]) -> int | None:
    """Return the version of the weight sync that ran at a time or ended at most `_AFTER_NS` before. None if
    there is no such sync, or if several such syncs have different versions.
    """
    found = {version for start, end, version in syncs if start <= ns <= end + _AFTER_NS}
    return found.pop() if len(found) == 1 else None


def _number(version: int | str | None) -> int | str | None:
    return int(version) if isinstance(version, str) and version.isdecimal() else version


class EngineTime(msgspec.Struct, kw_only=True):
    """Times of requests in their engine, in ns. The parts of one request do not overlap."""

    queued_ns: int = 0
    """Time in the engine's queue before the first pass."""
    prefill_ns: int = 0
    """Time of the request's passes up to its first output token."""
    alone_ns: int = 0
    """Time of later passes with no other request."""
    few_ns: int = 0
    """Time of later passes with 2 to `FEW` - 1 requests."""
    many_ns: int = 0
    """Time of later passes with at least `FEW` requests."""
    held_ns: int = 0
    """Time between passes in which the engine served other requests instead."""
    preempted_ns: int = 0
    """Time between passes in which the engine served other requests, after this request was preempted."""

    @property
    def total_ns(self) -> int:
        return sum(msgspec.structs.astuple(self))


def add_request(
    time: EngineTime, engine: EnginePasses, request: int, rows: Sequence[int], pass_of: Sequence[int]
) -> None:
    """Add the times of one request to `time`. The time between two passes of the request counts as time of
    the later pass, unless other passes ran in between.
    """
    noted, places = engine.noted, [pass_of[row] for row in rows]
    if not places:
        return
    lost = {
        number
        for number, who in zip(noted.preempted.number, noted.preempted.request, strict=True)
        if who == request
    }
    arrived_ns = noted.requests.arrived_ns[request]
    if arrived_ns is not None:
        time.queued_ns += max(0, noted.passes.begin_ns[places[0]] - arrived_ns)
    begun, before = False, None
    for row, place in zip(rows, places, strict=True):
        begin_ns, end_ns = engine.begins_ns[place], engine.ends_ns[place]
        if before is not None:
            gap_ns = max(0, begin_ns - engine.ends_ns[before])
            if any(before < number <= place for number in lost):
                time.preempted_ns += gap_ns
            elif place > before + 1:
                time.held_ns += gap_ns
            else:
                begin_ns -= gap_ns
        took_ns = end_ns - begin_ns
        batch = noted.passes.requests[place]
        if not begun:
            time.prefill_ns += took_ns
        elif batch == 1:
            time.alone_ns += took_ns
        elif batch < FEW:
            time.few_ns += took_ns
        else:
            time.many_ns += took_ns
        begun, before = begun or noted.served.output[row] > 0, place


class TurnTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one turn, by the work of its engine."""

    turn: int | None
    wall_ns: int
    """Duration of the turn in ns."""
    requests: tuple[str, ...]
    """The engine's ids of the turn's requests."""
    replica: int
    engine: EngineTime
    outside_ns: int
    """Time of the turn outside of its engine, for example in tools, transport or tokenizing."""
    tokens: int
    """Output tokens of the turn's requests."""


def turn_times(timeline: Timeline, trajectories: Sequence[str]) -> Mapping[str, tuple[TurnTime, ...]]:
    """Return {trajectory: its turns in order}. Turns without a known request are left out."""
    wanted = set(trajectories)
    of_turn: dict[tuple[str, int | None], list[RequestKey]] = defaultdict(list)
    for key, index in linked_requests(timeline).items():
        span = timeline.spans[index]
        if span.trajectory in wanted:
            of_turn[span.trajectory or "", span.turn].append(key)
    walls_ns: dict[tuple[str, int | None], int] = {}
    for span in timeline.spans:
        if span.stage == ("trajectory" if span.turn is None else "turn"):
            walls_ns[span.trajectory or "", span.turn] = timeline.until_ns(span) - span.start_ns
    rows = [passes_of_requests(engine) if of_turn else [] for engine in timeline.passes]
    places = [pass_of_rows(engine) if of_turn else [] for engine in timeline.passes]
    turns: dict[str, list[TurnTime]] = defaultdict(list)
    for (trajectory, turn), keys in sorted(of_turn.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        time, tokens = EngineTime(), 0
        for at, request in keys:
            engine = timeline.passes[at]
            add_request(time, engine, request, rows[at][request], places[at])
            tokens += sum(engine.noted.served.output[row] for row in rows[at][request])
        wall_ns = walls_ns.get((trajectory, turn), time.total_ns)
        turns[trajectory].append(
            TurnTime(
                turn=turn,
                wall_ns=wall_ns,
                requests=tuple(timeline.passes[at].noted.requests.id[request] for at, request in keys),
                replica=timeline.passes[keys[0].engine].replica,
                engine=time,
                outside_ns=max(0, wall_ns - time.total_ns),
                tokens=tokens,
            )
        )
    return {name: tuple(own) for name, own in turns.items()}


def requests_blocks(requests: Sequence[Request], report: StepReport) -> Iterator[Block]:
    """Yield a table of the output tokens by version lag, if there is a lag."""
    tokens = Counter[int]()
    for request in requests:
        for lag in request.lags:
            tokens[lag.versions] += lag.tokens
    if any(tokens):
        share = partial(percent_of, total=tokens.total())
        rows = tuple((str(lag), f"{number:,}", share(number)) for lag, number in sorted(tokens.items()))
        changed = sum(len(request.lags) > 1 for request in requests)
        note = f"{changed:,} of {len(requests):,} requests ran while weights changed." if changed else ""
        columns = (">versions behind", ">tokens", ">of all, %")
        yield TextTable("Tokens by the age of their weights", columns, rows, note, "line")


REQUESTS = Section(
    name="requests",
    title="Requests",
    compute=lambda sources: step_requests(sources.whole),
    terminal=requests_blocks,
    page=ROLLOUT,
)
