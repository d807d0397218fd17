"""Counters over the step: the least, the mean and the most of each, and devices that idled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.files.counters import (
    GPU,
    NPU,
    RUNNING_REQUESTS,
    UNFINISHED_REQUESTS,
    WAITING_REQUESTS,
    CounterKind,
    CounterScope,
)
from stepscope_report.accounting import Pair, common_ns, joined
from stepscope_report.spans import is_tool, placed
from stepscope_report.table import Table
from stepscope_report.tables.event_loops import LateLoop, late_loops
from stepscope_report.timeline import Counter, Timeline


class CounterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One counter over the step."""

    process: str
    """The process that sampled it."""
    role: str
    host: str
    scope: CounterScope
    name: str
    of: str
    """`GPU 3`, `replica 0`; empty for the process, or the host, itself."""
    unit: str
    kind: CounterKind
    samples: int
    """In the step."""
    least: float
    mean: float
    """Over time: each value counts for the time since the sample before."""
    most: float
    covered_ns: int
    """Part of the step between its first and its last sample."""
    increase: float | None = None
    """Growth of a total over the step. None: it is no total."""


class IdleDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or NPU at 0 %."""

    device: str
    host: str
    idle_ns: int
    """Time at 0 %, to the length of a sample."""
    tools_ns: int
    """Of that, while a tool or an environment ran."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    rows: Table[CounterRow]
    """By process, in the order in which it sampled them first."""
    late_loops: Table[LateLoop] = Table()
    """Event loops that were late by more than 100 ms, the latest first. A call that had its loop for itself
    makes none late."""
    idle_devices: Table[IdleDevice]
    """Devices that were at 0 % at some time, the most idle first."""


class Piece(NamedTuple):
    """A value, and the time for which it stands: since the sample before."""

    start_ns: int
    end_ns: int
    value: float


def step_counters(timeline: Timeline) -> Counters | None:
    """Return the counters of the step; None if none were sampled."""
    sampled = [(counter, pieces) for counter in timeline.counters if (pieces := pieces_of(counter, timeline))]
    if not sampled:
        return None
    idle = sorted(_idle(timeline, sampled), key=lambda device: (-device.idle_ns, device.host, device.device))
    rows = (_row(counter, pieces, timeline) for counter, pieces in sampled)
    late = sorted(late_loops(timeline), key=lambda loop: (-loop.late_ns, loop.process, loop.thread))
    return Counters(rows=Table(rows), late_loops=Table(late), idle_devices=Table(idle))


def pieces_of(counter: Counter, timeline: Timeline) -> list[Piece]:
    """Return the values of the step. The first sample of a counter has no length.

    An unaligned process has no place in the step, so that all of its values count.
    """
    times = counter.times_ns
    pieces = map(Piece, (*times[:1], *times), times, counter.values)
    if not timeline.processes[counter.process].aligned:
        return list(pieces)
    start_ns, end_ns = timeline.window.start_ns, timeline.window.end_ns
    return [
        Piece(max(piece.start_ns, start_ns), min(piece.end_ns, end_ns), piece.value)
        for piece in pieces
        if piece.end_ns >= start_ns and piece.start_ns <= end_ns
    ]


def requests_held(timeline: Timeline, number: int, role: str) -> list[Pair] | None:
    """Return the stretches in which a replica had requests. None if no counter says it.

    Its front end counts those that it has not answered, whatever its scheduler knows. The last value stands
    to the end of the step.

    Args:
        role: Role of the processes that sample it, if another role has a replica of that number.
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
    pieces = [piece for counter in sampled for piece in pieces_of(counter, timeline)]
    end_ns = timeline.window.end_ns
    pieces += [Piece(counter.times_ns[-1], end_ns, counter.values[-1]) for counter in sampled]
    return [
        (piece.start_ns, piece.end_ns) for piece in pieces if piece.value and piece.start_ns < piece.end_ns
    ]


def _row(counter: Counter, pieces: Sequence[Piece], timeline: Timeline) -> CounterRow:
    process = timeline.processes[counter.process]
    values = [piece.value for piece in pieces]
    covered_ns = sum(piece.end_ns - piece.start_ns for piece in pieces)
    weighed = sum(piece.value * (piece.end_ns - piece.start_ns) for piece in pieces)
    return CounterRow(
        process=process.name,
        role=process.info.role,
        host=process.info.host,
        scope=counter.scope,
        name=counter.name,
        of=counter.of,
        unit=counter.unit,
        kind=counter.kind,
        samples=len(pieces),
        least=min(values),
        mean=weighed / covered_ns if covered_ns else sum(values) / len(values),
        most=max(values),
        covered_ns=covered_ns,
        increase=values[-1] - _at_start(counter, timeline) if counter.kind == "total" else None,
    )


def _at_start(counter: Counter, timeline: Timeline) -> float:
    """Return the latest value from before the step, or the first one."""
    earlier = [
        value
        for at_ns, value in zip(counter.times_ns, counter.values, strict=True)
        if at_ns <= timeline.window.start_ns and timeline.processes[counter.process].aligned
    ]
    return earlier[-1] if earlier else counter.values[0]


def _idle(timeline: Timeline, sampled: Sequence[tuple[Counter, list[Piece]]]) -> Iterator[IdleDevice]:
    tools = joined(placed(timeline, (span for span in timeline.spans if is_tool(span.role, span.stage))))
    for counter, pieces in sampled:
        idle = [(piece.start_ns, piece.end_ns) for piece in pieces if piece.value == 0]
        if counter.name in (GPU, NPU) and (idle_ns := sum(end - start for start, end in idle)):
            process = timeline.processes[counter.process]
            tools_ns = common_ns(idle, tools) if process.aligned else 0
            yield IdleDevice(
                device=counter.of or counter.name, host=process.info.host, idle_ns=idle_ns, tools_ns=tools_ns
            )
