"""Predictions of a step's time: the measured step, its replay unchanged, and its replay with changes.

The prediction is the measured time, times the ratio of the changed replay to the unchanged one. A generation
needs the tokens that it wrote, served by the curve of `curve`. If the unchanged replay is not within 3 % of
the measured step, a generation needs what the curve gives in its duration (`work: durations`).
If that does not fit either, or the tokens explain the durations badly, there is no prediction.

The interval holds 95 % of the ratios of rounds, by Student's t of their logarithms, so that few rounds do.
Each round resamples the trajectories with replacement, fits the curve to these, and replays them unchanged
and changed. The residual of the fit enters by the work of the generations: in each round it lies at another
point between tokens and durations. So does the curve, where the step measured none: between the least and the
most that a replica may do there. The misfit of the unchanged replay is added to both ends.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from math import exp, log
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.errors import RecordError
from stepscope.report.formatting import duration
from stepscope.report.whatif.changes import Changes, Options, changes_of
from stepscope.report.whatif.curve import Curve, fit, speeds
from stepscope.report.whatif.flight import Flight
from stepscope.report.whatif.model import Call, Step, Trajectory
from stepscope.report.whatif.outcome import ROLLOUT, Outcome, outcome
from stepscope.report.whatif.read import read_step
from stepscope.report.whatif.replay import Rules, assignment, replay
from stepscope.timeline import Timeline

LIMIT = 0.03
"""The unchanged replay may be off by this part of the step."""
RESIDUAL = 0.5
"""The largest residual of the fit with which a generation may need what its duration gives."""
_ROUNDS = 40
_FEWEST = 8
"""Rounds of a step with many calls."""
_CALLS = 40_000
"""Calls of all rounds together, unless these are the fewest."""

Work: TypeAlias = Literal["tokens", "durations"]


class StageTime(msgspec.Struct, frozen=True):
    """One stage of the step: measured, and in the two replays. All in ns."""

    name: str
    measured_ns: int
    replayed_ns: int
    predicted_ns: int


class CurvePoint(msgspec.Struct, frozen=True):
    """One point of the service curve of a replica."""

    requests: float
    tokens_per_second: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model of the step that the replay rests on."""

    trajectories: int
    generations: int
    replicas: tuple[str, ...]
    speeds: tuple[float, ...]
    """By replica: its speed, where 1 is the curve's."""
    tool_pool: int | None
    """Tools at once. None: tools do not wait for each other."""
    at_once: int | None
    """Trajectories at once. None: nothing shows a limit."""
    work: Work
    residual: float
    """Standard deviation of ln(tokens / tokens by the curve) over the generations."""
    curve: tuple[CurvePoint, ...]


class _Played(NamedTuple):
    trajectories: Sequence[Trajectory]
    works: Sequence[float]
    """By `Call.number`: tokens."""
    curve: Curve
    speeds: Sequence[float]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time of a step with changes. Times are integer ns."""

    format: int = 1
    step: int
    run_id: str
    changes: tuple[str, ...]
    """In words. Empty: the step is replayed as it is."""
    measured_ns: int
    replayed_ns: int
    """The replay without a change."""
    predicted_ns: int
    low_ns: int
    high_ns: int
    """The interval of 95 %."""
    change: float
    """Of the step's time: -0.1 is 10 % less."""
    stages: tuple[StageTime, ...]
    model: Model
    assumptions: tuple[str, ...]


def predict(timeline: Timeline, options: Options) -> Prediction:
    """Return the predicted time of a step with the changes of `options`.

    Raises:
        ConfigError: an option is wrong, or cannot apply to the step.
        RecordError: the step cannot be replayed, or its replay does not fit it.
    """
    return Predicting(timeline).predict(options)


class Predicting:
    """Predictions of one step: the model and the rounds of the interval are made once for all changes."""

    def __init__(self, timeline: Timeline) -> None:
        """
        Raises:
            RecordError: the step cannot be replayed.
        """
        self._step = step = read_step(timeline)
        self._unchanged = Changes(replicas=len(step.rollout.replicas), tool_pool=step.rollout.tool_pool)
        self._calls = step.rollout.generations()
        _check_tokens(step, self._calls)
        self._flight = Flight(self._calls)
        self._curve = fit(self._flight)
        self._speeds = speeds(self._flight, self._curve, len(step.rollout.replicas))
        self._by_duration = [0.0] * len(step.rollout.calls())
        self._by_tokens = list(self._by_duration)
        for call, tokens in zip(self._calls, self._flight.served_by(self._curve.rate), strict=True):
            self._by_duration[call.number] = tokens * self._speeds[call.replica or 0]
            self._by_tokens[call.number] = float(call.tokens or self._by_duration[call.number])

    def predict(self, options: Options) -> Prediction:
        """Return the predicted time with the changes of `options`. Raises as the function `predict`."""
        changes = changes_of(options, self._step)
        work, unchanged = self._fitting
        works = self._by_tokens if work == "tokens" else self._by_duration
        changed = self._replayed(
            _Played(self._step.rollout.trajectories, works, self._curve, self._speeds), changes
        )
        ratio, wall_ns = changed.step_ns / unchanged.step_ns, self._step.wall_ns
        low, high = self._interval(ratio, changes)
        misfit_ns = abs(unchanged.step_ns - wall_ns)
        return Prediction(
            step=self._step.number,
            run_id=self._step.run_id,
            changes=changes.words,
            measured_ns=wall_ns,
            replayed_ns=round(unchanged.step_ns),
            predicted_ns=round(wall_ns * ratio),
            low_ns=round(wall_ns * low - misfit_ns),
            high_ns=round(wall_ns * high + misfit_ns),
            change=ratio - 1,
            stages=self._stages(unchanged, changed),
            model=self._model(work),
            assumptions=changes.assumptions(),
        )

    @cached_property
    def _fitting(self) -> tuple[Work, Outcome]:
        """The works with which the unchanged replay fits the step, and that replay."""
        tried: list[Outcome] = []
        choices: tuple[tuple[Work, list[float]], ...] = (
            ("tokens", self._by_tokens),
            ("durations", self._by_duration),
        )
        for work, works in choices:
            played = _Played(self._step.rollout.trajectories, works, self._curve, self._speeds)
            unchanged = self._replayed(played, self._unchanged)
            tried.append(unchanged)
            if abs(unchanged.step_ns / self._step.wall_ns - 1) > LIMIT:
                continue
            if work == "tokens" or self._residual() <= RESIDUAL:
                return work, unchanged
        raise RecordError(_misfit(self._step, tried[0]))

    def _replayed(self, played: _Played, changes: Changes) -> Outcome:
        factors = played.speeds[: changes.replicas]
        rules = Rules(
            curve=played.curve,
            speeds=(*factors, *[1.0] * (changes.replicas - len(factors))),
            works=played.works,
            assigned=assignment(played.trajectories, played.works, changes, len(played.speeds)),
            tool_pool=changes.tool_pool,
            at_once=self._step.rollout.at_once,
        )
        return outcome(self._step, changes, replay(played.trajectories, rules))

    def _interval(self, ratio: float, changes: Changes) -> tuple[float, float]:
        """Return the interval of the ratio. It is in it."""
        if not changes.words:
            return ratio, ratio
        logs = [
            log(self._replayed(played, changes).step_ns / unchanged_ns)
            for played, unchanged_ns in self._rounds
        ]
        middle, half = statistics.fmean(logs), _student(len(logs) - 1) * statistics.stdev(logs)
        return min(ratio, exp(middle - half)), max(ratio, exp(middle + half))

    @cached_property
    def _rounds(self) -> list[tuple[_Played, float]]:
        """Resamples, and the ns of the step in the unchanged replay of each."""
        rounds = max(_FEWEST, min(_ROUNDS, _CALLS // max(1, len(self._by_tokens))))
        generator = random.Random(0)
        resamples = [self._resampled(generator) for _ in range(rounds)]
        return [(played, self._replayed(played, self._unchanged).step_ns) for played in resamples]

    def _resampled(self, generator: random.Random) -> _Played:
        drawn = generator.choices(self._step.rollout.trajectories, k=len(self._step.rollout.trajectories))
        drawn.sort(key=lambda played: played.start_ns)
        times = Counter(call.number for played in drawn for call in played.generations())
        weights = [times[call.number] for call in self._calls]
        known = any(call.tokens and weight for call, weight in zip(self._calls, weights, strict=True))
        curve = fit(self._flight, weights, self._curve) if known else self._curve
        part, beyond = generator.random(), generator.random()
        works = [
            tokens**part * by_duration ** (1 - part)
            for tokens, by_duration in zip(self._by_tokens, self._by_duration, strict=True)
        ]
        factors = speeds(self._flight, curve, len(self._speeds))
        return _Played(drawn, works, msgspec.structs.replace(curve, beyond=beyond), factors)

    def _stages(self, unchanged: Outcome, changed: Outcome) -> tuple[StageTime, ...]:
        measured = outcome(
            self._step, self._unchanged, [played.end_ns for played in self._step.rollout.trajectories]
        )
        rows = zip_longest(measured.stages, unchanged.stages, changed.stages, fillvalue=("", 0.0))
        return tuple(
            StageTime(last[0], round(first[1]), round(replayed[1]), round(last[1]))
            for first, replayed, last in rows
        )

    def _model(self, work: Work) -> Model:
        rollout = self._step.rollout
        return Model(
            trajectories=len(rollout.trajectories),
            generations=len(self._calls),
            replicas=rollout.replicas,
            speeds=tuple(round(speed, 3) for speed in self._speeds),
            tool_pool=rollout.tool_pool,
            at_once=rollout.at_once,
            work=work,
            residual=round(self._residual(), 3),
            curve=tuple(
                CurvePoint(round(requests, 1), round(total * 1e9, 1))
                for requests, total in self._curve.points
            ),
        )

    def _residual(self) -> float:
        logs = [
            log(call.tokens / self._by_duration[call.number])
            for call in self._calls
            if call.tokens and self._by_duration[call.number]
        ]
        return statistics.pstdev(logs)


def _student(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t, to 1 % from 7 degrees of freedom on.

    The expansion in Abramowitz and Stegun, 26.7.5.
    """
    return 1.96 + 2.372 / freedom + 2.822 / freedom**2


def _check_tokens(step: Step, calls: Sequence[Call]) -> None:
    known = sum(bool(call.tokens) for call in calls)
    if known * 2 < len(calls):
        raise RecordError(
            f"step {step.number}: {known} of {len(calls)} generations say how many tokens they wrote, and at "
            "least half must. Fix: set `tokens` on their spans, or use `record_request`"
        )


def _misfit(step: Step, replayed: Outcome) -> str:
    rollout_ns = dict(replayed.stages)[ROLLOUT]
    off = replayed.step_ns / step.wall_ns - 1
    return (
        f"step {step.number}: no prediction, because the replay of the unchanged step takes "
        f"{duration(round(replayed.step_ns))} and it took {duration(step.wall_ns)} ({off:+.1%}, at most "
        f"{LIMIT:.0%}). The stage that does not fit is the rollout: replayed {duration(round(rollout_ns))}, "
        f"measured {duration(step.rollout.wall_ns)}. The tokens of its generations do not explain their times"
    )
