"""Requests of a step, joined to the turns that made them, and the time of turns by what their engine did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from stepscope_report.timeline import Timeline
from stepscope_report.timeline.model import EnginePasses
from stepscope_report.timeline.step.passes import (
    RequestKey,
    linked_requests,
    pass_of_rows,
    passes_of_requests,
)

FEW = 4
"""A batch of fewer requests than this is called small."""


class EngineTime(msgspec.Struct, kw_only=True):
    """Time of requests in their engines, in ns. The parts do not overlap, as far as requests do not."""

    queued_ns: int = 0
    """Time in the engine's queue, until the first pass."""
    prefill_ns: int = 0
    """Passes that read the prompt, up to the first token of the output."""
    alone_ns: int = 0
    """Later passes that served no other request."""
    few_ns: int = 0
    """Later passes with fewer than `FEW` requests, and more than one."""
    many_ns: int = 0
    """Later passes with at least `FEW` requests."""
    held_ns: int = 0
    """Time in which the engine served others instead."""
    preempted_ns: int = 0
    """The same, after the request had lost its place in the KV cache."""

    @property
    def total_ns(self) -> int:
        return sum(msgspec.structs.astuple(self))


def add_request(
    time: EngineTime, engine: EnginePasses, request: int, rows: Sequence[int], pass_of: Sequence[int]
) -> None:
    """Add the time of one request. The time between two passes with no other pass in between belongs to the
    later one.
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
    """The time of one turn, by what its engine did."""

    turn: int | None
    wall_ns: int
    """Duration of the turn."""
    requests: tuple[str, ...]
    """The engine's ids of its requests."""
    replica: int
    engine: EngineTime
    outside_ns: int
    """Time of the turn outside of its engine: tools, the way there and back, tokenizing."""
    tokens: int
    """Tokens that its requests wrote."""


def turn_times(timeline: Timeline, trajectories: Sequence[str]) -> Mapping[str, tuple[TurnTime, ...]]:
    """Return the turns of these trajectories whose requests are known."""
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
