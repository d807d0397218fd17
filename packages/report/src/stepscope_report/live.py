"""A run at this moment, from its files: past steps, the running one, and the calls that go on in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from stepscope.files.recorder import StepLine
from stepscope.files.states import OpenSpan, ProcessState
from stepscope.files.uncaptured import like
from stepscope_report.fleet import Fleet, Sampled, fleets
from stepscope_report.formatting import middle
from stepscope_report.table import grouped

COMPARED = 50
"""The running step is compared with at most this many steps, the latest ones."""
_NAMED = 8
"""Number of trajectories that are named."""


class StageNow(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the process that bounds steps, over the last steps."""

    stage: str
    """`role/stage`."""
    last_s: float
    """Seconds in the last step that ended; 0 if the stage did not run."""
    median_s: float
    """Median over the steps in which the stage ran."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one role that go on."""

    role: str
    processes: int
    calls: int
    stages: tuple[str, ...]
    """The stages of these calls, the most frequent first."""
    oldest_ns: int


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that is under way."""

    trajectory: str
    turn: int | None
    stage: str
    """The innermost call of the trajectory."""
    age_ns: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The view that `stepscope watch` shows."""

    steps: int
    """Steps that have ended."""
    durations_ns: tuple[int, ...]
    """The durations of the last steps, the latest last."""
    between_ns: int | None
    """Median time between two of these steps; None if no two follow each other."""
    median_ns: int | None
    """The median of the last steps that are of the kind of the step that runs. None if there is none."""
    compared: int
    """Number of steps that `median_ns` is computed from."""
    running: int | None
    """The step that runs now, or None if none does."""
    running_ns: int | None
    tokens_per_s: dict[str, float] = {}
    """{`rollout` or `train`: tokens per second of the last step that counted tokens}."""
    stages: tuple[StageNow, ...]
    lanes: tuple[Lane, ...]
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
) -> Live:
    """Return the run at this moment.

    Args:
        lines: The lines of the run's steps.
        states: The states of the processes that answered.
        recorded: Counters of the last step on disk that has some.
        recorded_step: The number of that step.
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
        durations_ns=tuple(line.dur_ns for line in last),
        between_ns=middle(between) if between else None,
        median_ns=middle(usual) if usual else None,
        compared=len(usual),
        running=running,
        running_ns=None if owner is None else owner.step_age_ns,
        tokens_per_s=_tokens_per_s(last),
        stages=tuple(_stages(last)),
        lanes=tuple(_lanes(states)),
        flights=len(flights) + _left_out(states),
        oldest=tuple(flights[:_NAMED]),
        fleets=tuple(
            fleets([Sampled(state.process, state.counters) for state in states], recorded, recorded_step)
        ),
    )


def usual_ns(lines: Sequence[StepLine], step: int | None) -> list[int]:
    """Return the durations of the last steps of the kind of the step with the number `step`, or of all
    steps if `step` is None."""
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
    """Return the number of trajectories that the states leave out, because others are at the same place in
    the code.
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
