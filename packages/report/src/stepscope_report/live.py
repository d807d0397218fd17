"""A run at this moment: its past steps, the running step with its open calls, and its devices and engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import (
    GPU,
    GPU_MEMORY,
    KV_CACHE,
    NPU,
    NPU_MEMORY,
    RUNNING_REQUESTS,
    TORCH_RESERVED,
    WAITING_REQUESTS,
)
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import CounterNow, OpenSpan, ProcessState
from stepscope.files.steps import StepLine, like
from stepscope_report.accounting import rank_of
from stepscope_report.formatting import middle
from stepscope_report.table import grouped

COMPARED = 50
"""Number of the latest steps with which the running step is compared."""
_NAMED = 8
"""Largest number of trajectories in `Live.oldest`."""


class StageNow(msgspec.Struct, frozen=True, kw_only=True):
    """A top stage of the steps' owner, over the last steps."""

    stage: str
    """`role/stage`."""
    last_s: float
    """Duration in seconds in the last step that ended; 0 if the stage did not run."""
    median_s: float
    """Median duration in seconds, over the last steps in which the stage ran."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The open calls of one role."""

    role: str
    processes: int
    calls: int
    stages: tuple[str, ...]
    """The stages of the open calls, the most frequent first."""
    oldest_ns: int


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that is under way."""

    trajectory: str
    turn: int | None
    stage: str
    """Stage of the innermost open call of the trajectory."""
    age_ns: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The view that `stepscope watch` shows."""

    steps: int
    """Steps that have ended."""
    answers: int = 0
    """Processes that answered."""
    durations_ns: tuple[int, ...]
    """The durations of the last steps, the latest last."""
    between_ns: int | None
    """Median time from the end of a step in `durations_ns` to the start of the next step; None if no two of
    the steps are consecutive."""
    median_ns: int | None
    """Median duration of the last steps of the same kind as the running step, or None if there are none."""
    compared: int
    """Number of steps that `median_ns` is computed from."""
    running: int | None
    """The step that runs now, or None if none does."""
    running_ns: int | None
    tokens_per_s: dict[str, float] = {}
    """{`rollout` or `train`: tokens per second of the last step that counted tokens}."""
    stages: tuple[StageNow, ...]
    lanes: tuple[Lane, ...]
    dead: tuple[str, ...] = ()
    """Names of workers and ranks whose process has ended, while other processes answered."""
    flights: int
    """Number of trajectories under way."""
    oldest: tuple[Flight, ...]
    """The trajectories that have run for longest, the longest first."""
    fleets: tuple[Fleet, ...] = ()
    """The sampled devices and engines."""


def live(
    lines: Sequence[StepLine],
    states: Sequence[ProcessState],
    *,
    recorded: Sequence[Sampled] = (),
    recorded_step: int | None = None,
    dead: Sequence[str] = (),
) -> Live:
    """Return the run at this moment.

    Args:
        lines: The lines of the run's steps.
        states: The states of the processes that answered.
        recorded: Counters of the last step on disk that has some.
        recorded_step: The number of that step.
        dead: Names of processes that have ended while other processes answered.
    """
    last = list(lines)[-COMPARED:]
    owner = next((state for state in states if state.step_age_ns is not None), None)
    running = None if owner is None else owner.step
    usual = usual_ns(last, running)
    between = [
        max(0, after.start_ns - line.start_ns - line.dur_ns)
        for line, after in pairwise(last)
        if after.step == line.step + 1
    ]
    flights = sorted(_flights(states), key=lambda flight: -flight.age_ns)
    return Live(
        steps=len(lines),
        answers=len(states),
        durations_ns=tuple(line.dur_ns for line in last),
        between_ns=middle(between) if between else None,
        median_ns=middle(usual) if usual else None,
        compared=len(usual),
        running=running,
        running_ns=None if owner is None else owner.step_age_ns,
        tokens_per_s=_tokens_per_s(last),
        stages=tuple(_stages(last)),
        lanes=tuple(_lanes(states)),
        dead=tuple(dead),
        flights=len(flights) + _left_out(states),
        oldest=tuple(flights[:_NAMED]),
        fleets=tuple(
            fleets([Sampled(state.process, state.counters) for state in states], recorded, recorded_step)
        ),
    )


def usual_ns(lines: Sequence[StepLine], step: int | None) -> list[int]:
    """Return the durations of the last steps of the same kind as step number `step`, or of all last steps if
    `step` is None.
    """
    took = {line.step: line.dur_ns for line in lines[-COMPARED:]}
    same = took if step is None else like(step, took)
    return [ns for number, ns in took.items() if number in same]


def _tokens_per_s(last: Sequence[StepLine]) -> dict[str, float]:
    line = next((line for line in reversed(last) if line.tokens and line.dur_ns), None)
    return {} if line is None else {kind: n * 1e9 / line.dur_ns for kind, n in line.tokens.items()}


def _stages(last: Sequence[StepLine]) -> list[StageNow]:
    taken: dict[str, list[float]] = {}
    for line in last:
        for stage, seconds in line.stages.items():
            taken.setdefault(stage, []).append(seconds)
    stages = [
        StageNow(
            stage=stage,
            last_s=last[-1].stages.get(stage, 0.0),
            median_s=sorted(seconds)[len(seconds) // 2],
        )
        for stage, seconds in taken.items()
    ]
    return sorted(stages, key=lambda stage: -stage.median_s)


def _innermost(state: ProcessState) -> list[OpenSpan]:
    above = {span.parent for span in state.spans}
    return [span for span in state.spans if span.span not in above]


def _lanes(states: Sequence[ProcessState]) -> list[Lane]:
    inner = ((state.process.key, span) for state in states for span in _innermost(state))
    calls = grouped(inner, lambda call: call[1].role)
    return [
        Lane(
            role=role,
            processes=len({process for process, _ in spans}),
            calls=sum(1 + span.alike for _, span in spans),
            stages=tuple(stage for stage, _ in Counter(span.stage for _, span in spans).most_common()),
            oldest_ns=max(span.age_ns for _, span in spans),
        )
        for role, spans in sorted(calls.items())
    ]


def _left_out(states: Sequence[ProcessState]) -> int:
    """Return the number of trajectories that the states leave out because another trajectory is at the same
    place in the code.
    """
    return sum(span.alike for state in states for span in state.spans if span.trajectory is not None)


def _flights(states: Sequence[ProcessState]) -> list[Flight]:
    """Return each trajectory once, with the age of its oldest span and the stage of its youngest call."""
    oldest: dict[str, int] = {}
    inner: dict[str, OpenSpan] = {}
    for span in (span for state in states for span in state.spans):
        if span.trajectory is None:
            continue
        oldest[span.trajectory] = max(span.age_ns, oldest.get(span.trajectory, 0))
        if span.trajectory not in inner or span.age_ns <= inner[span.trajectory].age_ns:
            inner[span.trajectory] = span
    return [
        Flight(trajectory=name, turn=inner[name].turn, stage=inner[name].stage, age_ns=age_ns)
        for name, age_ns in oldest.items()
    ]


# Each device and each engine has a row. If there are many, the view has spreads and worst values instead.

_MOST_ROWS = 64
"""Largest number of devices, or of engines, that get a row each. If there are more, spreads are shown."""

Group: TypeAlias = Literal["devices", "engines"]


class Column(NamedTuple):
    """One figure of a device or engine."""

    title: str
    unit: str
    names: tuple[str, ...]
    """The names of the column's counters."""
    lowest_is_worst: bool = False


COLUMNS: Mapping[Group, tuple[Column, ...]] = {
    "devices": (
        Column("utilisation", "%", (GPU, NPU), lowest_is_worst=True),
        Column("memory", "B", (GPU_MEMORY, NPU_MEMORY)),
        Column("torch reserved", "B", (TORCH_RESERVED,)),
    ),
    "engines": (
        Column("running", "", (RUNNING_REQUESTS,), lowest_is_worst=True),
        Column("waiting", "", (WAITING_REQUESTS,)),
        Column("KV cache", "%", (KV_CACHE,)),
    ),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """`GPU 3 of node-a`, `replica 0`; or `actor 0, cuda:0` if only torch samples the device."""
    values: dict[str, float]
    """{title of a column: mean over the last seconds, in the column's unit}."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One column over many devices or engines. Each percentile is the value of a device or engine
    (nearest rank).
    """

    column: str
    number: int
    """The number of devices or engines that have the counter."""
    p10: float
    median: float
    p90: float
    worst: float
    """The lowest utilisation, the fewest running requests, or the highest value of any other column."""
    whose: str


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    group: Group
    number: int
    step: int | None = None
    """The step on disk that the figures describe, or None if they describe the present."""
    rows: tuple[Row, ...] = ()
    """The rows; empty if there are more than `_MOST_ROWS`."""
    spreads: tuple[Spread, ...] = ()


class Sampled(NamedTuple):
    process: ProcessInfo
    counters: Sequence[CounterNow]


def fleets(now: Sequence[Sampled], last: Sequence[Sampled], step: int | None) -> Iterator[Fleet]:
    """Yield the devices, then the engines, where there are any.

    Args:
        now: Counters of the processes that answered.
        last: Counters of the last step on disk that has some, for processes that did not answer.
        step: The number of that step.
    """
    groups = []
    for group in COLUMNS:
        rows, of_step = _rows(group, now), None
        if not rows:
            rows, of_step = _rows(group, last), step
        if rows:
            groups.append((group, of_step, rows))
    many = any(len(rows) > _MOST_ROWS for _, _, rows in groups)
    for group, of_step, rows in groups:
        yield Fleet(
            group=group,
            number=len(rows),
            step=of_step,
            rows=() if many else tuple(rows),
            spreads=tuple(_spreads(group, rows)) if many else (),
        )


def _rows(group: Group, sampled: Iterable[Sampled]) -> list[Row]:
    titles = {name: column.title for column in COLUMNS[group] for name in column.names}
    values: dict[tuple[str, int, int, str], dict[str, float]] = {}
    for process, counters in sampled:
        for counter in counters:
            if counter.name in titles and counter.of:
                name = _name(process, counter)
                values.setdefault((*_order(process, counter), name), {})[titles[counter.name]] = counter.value
    rows = [Row(name=key[-1], values=own) for key, own in sorted(values.items())]
    whole = [row for row in rows if "utilisation" in row.values]
    return whole or rows  # rows with the host's counters instead of rows with only torch's


def _name(process: ProcessInfo, counter: CounterNow) -> str:
    if counter.name == TORCH_RESERVED:
        rank = f"pid {process.pid}" if process.rank is None else str(process.rank)
        return f"{process.role} {rank}, {counter.of}"
    is_device = counter.name in {name for column in COLUMNS["devices"] for name in column.names}
    return f"{counter.of} of {process.host}" if is_device else counter.of


def _order(process: ProcessInfo, counter: CounterNow) -> tuple[str, int, int]:
    """Return the sort key of a row: GPU 10 comes after GPU 9."""
    number = counter.of.rpartition(" ")[2]
    host = "" if counter.of.startswith("replica") else process.host
    rank = -1 if process.rank is None or counter.name != TORCH_RESERVED else process.rank
    return host, int(number) if number.isdecimal() else -1, rank


def _spreads(group: Group, rows: Sequence[Row]) -> Iterator[Spread]:
    for column in COLUMNS[group]:
        own = sorted((row.values[column.title], row.name) for row in rows if column.title in row.values)
        if not own:
            continue
        p10, median, p90 = (own[rank_of(percent, len(own))][0] for percent in (10, 50, 90))
        worst, whose = own[0] if column.lowest_is_worst else own[-1]
        yield Spread(
            column=column.title, number=len(own), p10=p10, median=median, p90=p90, worst=worst, whose=whose
        )
