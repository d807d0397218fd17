"""Predictions of a step's duration: the measured step, its replay without changes, and its replay with
changes.

The prediction is the measured duration times the ratio of the changed replay to the unchanged replay. In a
replay, a generation ends when its replica has served all its tokens. The speed of a replica is a service
curve, measured from recorded forward passes if there are any, else fitted (`curve`).

Models are tried until the unchanged replay differs from the measured step by at most 3 %. A model consists of
three choices. Models with the first alternatives are tried first:

1. The measured curve, or the fitted curve.
2. The queue for replicas that spans show, or replicas that serve all requests at once.
3. The recorded tokens as the work of a generation (`work: tokens`), or the tokens that the curve gives for
   the generation's measured duration (`work: durations`).

If no model fits, or the tokens explain the durations badly, there is no prediction.

The interval holds 95 % of the ratios, by Student's t of their logarithms over a few rounds. Each round draws
trajectories with replacement, fits the curve to them, and replays them without and with the changes. To
include the residual of the fit, a round draws the work of each generation at random between its recorded
tokens and the tokens by its duration. For numbers of requests that were not measured, a round draws the curve
at random between the lower and the upper bound. The misfit of the unchanged replay is added to both ends of
the interval.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import compress, product, zip_longest
from math import exp, log
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.errors import ConfigError, RecordError
from stepscope_report.formatting import duration
from stepscope_report.table import grouped
from stepscope_report.timeline import Timeline
from stepscope_report.whatif import Call, DriverStage, Step, Trajectory
from stepscope_report.whatif.changes import Changes, Options, changes_of, kept
from stepscope_report.whatif.curve import Curve, Flight, fit, speeds
from stepscope_report.whatif.read import read_step
from stepscope_report.whatif.replay import Rules, assignment, replay


class Saving(NamedTuple):
    """Time per step that a change is predicted to save, in ns. Negative if the step takes longer."""

    saving_ns: int
    error_ns: int
    """Distance in ns from the prediction to the farther end of its 95 % interval."""


WhatIf: TypeAlias = Callable[[Options], Saving | None]


def no_saving(options: Options) -> None:
    """Return None for every change: no saving is predicted."""
    return


def savings_of(timeline: Timeline) -> WhatIf:
    """Return a function that predicts the saving of a change. The function returns None if no prediction is
    possible.
    """

    @cache
    def step() -> Predicting | None:
        try:
            return Predicting(timeline)
        except RecordError:
            return None

    @cache
    def saving(options: Options) -> Saving | None:
        predicting = step()
        if predicting is None:
            return None
        try:
            prediction = predicting.predict(options)
        except (ConfigError, RecordError):
            return None
        least_ns, most_ns = prediction.low_ns, prediction.high_ns
        error_ns = max(prediction.predicted_ns - least_ns, most_ns - prediction.predicted_ns)
        return Saving(prediction.measured_ns - prediction.predicted_ns, error_ns)

    return saving


ROLLOUT = "rollout"
BESIDE = "runs beside others"
"""Name of the stage for the time in which rollout and training run at once. Its length is negative."""


class Outcome(msgspec.Struct, frozen=True):
    """Length of a step by stage: (name, ns) in order. Time in which stages run at once is a stage of negative
    length, so that the sum is the length of the step.
    """

    stages: tuple[tuple[str, float], ...]

    @property
    def step_ns(self) -> float:
        return sum(ns for _, ns in self.stages)


def outcome(step: Step, changes: Changes, ends_ns: Sequence[float]) -> Outcome:
    """Return the length of the step by stage.

    Args:
        ends_ns: End of each consumed trajectory, in ns from the start of the rollout.
    """
    ended = sorted(ends_ns)
    if changes.cut_tail is not None:
        ended = ended[: kept(len(ended), changes.cut_tail)]
    rollout_ns = ended[-1]
    after = list(step.after)
    if changes.overlap_reward:
        after = _scored(after, ended)
    stages = [
        *((stage.name, float(stage.wall_ns)) for stage in step.before),
        (ROLLOUT, rollout_ns),
        *((stage.name, float(stage.wall_ns)) for stage in after),
    ]
    if changes.staleness:
        stages.append((BESIDE, -_beside(step.before, rollout_ns, after)))
    return Outcome(tuple(stages))


def _scored(after: Sequence[DriverStage], ended: Sequence[float]) -> list[DriverStage]:
    """Return the stages after the rollout. Reward stages keep only the time that is left after the rollout.

    Trajectories are scored one after the other, each from its end at the earliest. Each trajectory takes an
    equal part of the measured reward time.
    """
    reward_ns = sum(stage.wall_ns for stage in after if stage.kind == "reward")
    done = 0.0
    for end in ended:
        done = max(done, end) + reward_ns / len(ended)
    left = (done - ended[-1]) / reward_ns
    return [
        DriverStage(stage.name, stage.kind, round(stage.wall_ns * left)) if stage.kind == "reward" else stage
        for stage in after
    ]


def _beside(before: Sequence[DriverStage], rollout_ns: float, after: Sequence[DriverStage]) -> float:
    """Return the time in which training and the next rollout run at once, in ns. Stages that move weights
    never run beside other stages.
    """
    generates = rollout_ns + sum(stage.wall_ns for stage in before if stage.kind != "weights")
    trains = sum(stage.wall_ns for stage in after if stage.kind != "weights")
    return min(generates, float(trains))


LIMIT = 0.03
"""Largest error of the unchanged replay, as a share of the step."""
RESIDUAL = 0.5
"""Largest residual of the fit for which `work: durations` is accepted."""
_ROUNDS = 40
_FEWEST = 8
"""Smallest number of rounds, used for steps with many calls."""
_CALLS = 40_000
"""Number of calls that all rounds together may replay, unless `_FEWEST` rounds need more."""

Work: TypeAlias = Literal["tokens", "durations"]


class StageTime(msgspec.Struct, frozen=True):
    """All calls of one stage of the step, in ns: as measured, in the unchanged replay, and in the changed
    one.
    """

    name: str
    measured_ns: int
    replayed_ns: int
    predicted_ns: int
    calls: int = 1


class CurvePoint(msgspec.Struct, frozen=True):
    """One point of a replica's service curve."""

    requests: float
    tokens_per_second: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model of the step on which a replay is based."""

    trajectories: int
    generations: int
    replicas: tuple[str, ...]
    speeds: tuple[float, ...]
    """Speed of each replica, relative to the service curve: 0.9 is 10 % slower than the curve."""
    tool_pool: int | None
    """Number of tools that can run at once, or None if no tool waited for a place."""
    at_once: int | None
    """Number of trajectories that can run at once, or None if the step shows no limit."""
    slots: int | None
    """Number of requests that each replica serves at once, or None for no limit."""
    work: Work
    residual: float
    """Standard deviation over generations of ln(tokens / tokens by the curve)."""
    measured: bool
    """True if recorded forward passes measured the curve, False if it is fitted to the generations."""
    curve: tuple[CurvePoint, ...]


class _Played(NamedTuple):
    trajectories: Sequence[Trajectory]
    works: Sequence[float]
    """Tokens that each generation needs, by `Call.number`."""
    curve: Curve
    speeds: Sequence[float]
    slots: int | None


class _Service:
    """Model of the step's replicas: their curve, their speeds, and the tokens that each generation needs."""

    def __init__(self, step: Step, calls: Sequence[Call], slots: int | None, curve: Curve | None) -> None:
        """
        Args:
            slots: Number of requests that a replica serves at once, or None for no limit.
            curve: The curve that forward passes measured, or None to fit one.
        """
        self.slots = slots
        self.flight = Flight(calls, slots)
        self.measured = curve
        self.curve = curve or fit(self.flight)
        self.speeds = speeds(self.flight, self.curve, len(step.rollout.replicas))
        self.by_duration = [0.0] * len(step.rollout.calls())
        self.by_tokens = list(self.by_duration)
        for call, tokens in zip(calls, self.flight.served_by(self.curve.rate), strict=True):
            self.by_duration[call.number] = tokens * self.speeds[call.replica or 0]
            self.by_tokens[call.number] = float(call.tokens or self.by_duration[call.number])
        logs = [
            log(call.tokens / self.by_duration[call.number])
            for call in calls
            if call.tokens and self.by_duration[call.number]
        ]
        self.residual = statistics.pstdev(logs)

    def played(self, trajectories: Sequence[Trajectory], work: Work) -> _Played:
        works = self.by_tokens if work == "tokens" else self.by_duration
        return _Played(trajectories, works, self.curve, self.speeds, self.slots)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted duration of a step with changes, in ns."""

    format: int = 1
    step: int
    run_id: str
    changes: tuple[str, ...]
    """The changes as text. Empty if the step is replayed without a change."""
    measured_ns: int
    replayed_ns: int
    """Duration of the step in the unchanged replay."""
    predicted_ns: int
    low_ns: int
    high_ns: int
    """End of the 95 % interval, which begins at `low_ns`."""
    change: float
    """Relative change of the step's duration: -0.1 is 10 % shorter."""
    stages: tuple[StageTime, ...]
    model: Model
    assumptions: tuple[str, ...]


def predict(timeline: Timeline, options: Options) -> Prediction:
    """Return the predicted duration of a step with the changes of `options`.

    Raises:
        ConfigError: an option is wrong, or cannot apply to the step.
        RecordError: the step cannot be replayed, or its replay does not fit the step.
    """
    return Predicting(timeline).predict(options)


class Predicting:
    """Predictions of one step. The model, and the rounds for the interval, are made once for all changes."""

    def __init__(self, timeline: Timeline) -> None:
        """
        Raises:
            RecordError: the step cannot be replayed.
        """
        self._step = step = read_step(timeline)
        self._unchanged = Changes(replicas=len(step.rollout.replicas), tool_pool=step.rollout.tool_pool)
        self._calls = step.rollout.generations()
        _check_tokens(step, self._calls)

    def predict(self, options: Options) -> Prediction:
        """Return the predicted duration with the changes of `options`.

        Raises:
            ConfigError: an option is wrong, or cannot apply to the step.
            RecordError: the replay does not fit the step, or cannot predict the change.
        """
        changes = changes_of(options, self._step)
        service, work, unchanged = self._fitting
        if changes.slots is not None and service.slots is None:
            raise RecordError(
                f"step {self._step.number}: --max-requests changes nothing, because the step fits a replica "
                "that serves all requests at once"
            )
        changed = self._replayed(service.played(self._step.rollout.trajectories, work), changes)
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
            model=self._model(service, work),
            assumptions=changes.assumptions(),
        )

    @cached_property
    def _fitting(self) -> tuple[_Service, Work, Outcome]:
        """Return (service, kind of work, unchanged replay) of the first model whose unchanged replay fits the
        step.
        """
        rollout, works = self._step.rollout, get_args(Work)
        tried: list[Outcome] = []
        measured = Curve(rollout.curve, larger=rollout.larger) if rollout.curve else None
        for curve, slots in dict.fromkeys(product((measured, None), (rollout.slots, None))):
            service = _Service(self._step, self._calls, slots, curve)
            for work in works:
                unchanged = self._replayed(service.played(rollout.trajectories, work), self._unchanged)
                tried.append(unchanged)
                fits = abs(unchanged.step_ns / self._step.wall_ns - 1) <= LIMIT
                if fits and (work == "tokens" or service.residual <= RESIDUAL):
                    return service, work, unchanged
        raise RecordError(_misfit(self._step, tried[0]))

    def _replayed(self, played: _Played, changes: Changes) -> Outcome:
        factors = played.speeds[: changes.replicas]
        rules = Rules(
            curve=played.curve,
            speeds=(*factors, *[1.0] * (changes.replicas - len(factors))),
            works=played.works,
            assigned=assignment(played.trajectories, played.works, changes, len(played.speeds)),
            slots=changes.slots or played.slots,
            tool_pool=changes.tool_pool,
            at_once=self._step.rollout.at_once,
        )
        return self._outcome(changes, played.trajectories, replay(played.trajectories, rules))

    def _outcome(
        self, changes: Changes, trajectories: Sequence[Trajectory], ends_ns: Sequence[float]
    ) -> Outcome:
        consumed = [one.consumed for one in trajectories]
        return outcome(self._step, changes, list(compress(ends_ns, consumed)))

    def _interval(self, ratio: float, changes: Changes) -> tuple[float, float]:
        """Return the 95 % interval of the ratio of durations, widened if necessary so that it contains
        `ratio`.
        """
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
        """Return random resamples of the step, each with its duration in the unchanged replay, in ns."""
        rounds = max(_FEWEST, min(_ROUNDS, _CALLS // max(1, len(self._step.rollout.calls()))))
        generator = random.Random(0)
        resamples = [self._resampled(generator) for _ in range(rounds)]
        return [(played, self._replayed(played, self._unchanged).step_ns) for played in resamples]

    def _resampled(self, generator: random.Random) -> _Played:
        service, _, _ = self._fitting
        trajectories = self._step.rollout.trajectories
        consumed = [played for played in trajectories if played.consumed]
        drawn = generator.choices(consumed, k=len(consumed))
        drawn += [played for played in trajectories if not played.consumed]
        drawn.sort(key=lambda played: played.start_ns)
        times = Counter(call.number for played in drawn for call in played.generations())
        weights = [times[call.number] for call in self._calls]
        known = any(call.tokens and weight for call, weight in zip(self._calls, weights, strict=True))
        # The computed points are left out: beyond the measured points, each round draws its curve at random.
        curve = msgspec.structs.replace(service.curve, larger=())
        if known and service.measured is None:
            curve = fit(service.flight, weights, service.curve)
        part, beyond = generator.random(), generator.random()
        works = [
            tokens**part * by_duration ** (1 - part)
            for tokens, by_duration in zip(service.by_tokens, service.by_duration, strict=True)
        ]
        factors = speeds(service.flight, curve, len(service.speeds))
        beyond_curve = msgspec.structs.replace(curve, beyond=beyond)
        return _Played(drawn, works, beyond_curve, factors, service.slots)

    def _stages(self, unchanged: Outcome, changed: Outcome) -> tuple[StageTime, ...]:
        trajectories = self._step.rollout.trajectories
        measured = self._outcome(self._unchanged, trajectories, [one.end_ns for one in trajectories])
        rows = zip_longest(measured.stages, unchanged.stages, changed.stages, fillvalue=("", 0.0))
        stages = []
        for name, calls in grouped(rows, lambda row: row[-1][0]).items():
            took, replayed, last = (round(sum(ns for _, ns in column)) for column in zip(*calls, strict=True))
            stages.append(StageTime(name, took, replayed, last, len(calls)))
        return tuple(stages)

    def _model(self, service: _Service, work: Work) -> Model:
        rollout = self._step.rollout
        return Model(
            trajectories=len(rollout.trajectories),
            generations=len(self._calls),
            replicas=rollout.replicas,
            speeds=tuple(round(speed, 3) for speed in service.speeds),
            tool_pool=rollout.tool_pool,
            at_once=rollout.at_once,
            slots=service.slots,
            work=work,
            residual=round(service.residual, 3),
            measured=service.measured is not None,
            curve=tuple(
                CurvePoint(round(requests, 1), round(total * 1e9, 1))
                for requests, total in service.curve.points
            ),
        )


def _student(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t, to 1 % from 7 degrees of freedom on.

    The formula is the expansion in Abramowitz and Stegun, 26.7.5.
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
    off = 100 * (replayed.step_ns / step.wall_ns - 1)
    return (
        f"step {step.number}: no prediction, because the replay of the unchanged step takes "
        f"{duration(round(replayed.step_ns))} and it took {duration(step.wall_ns)} ({off:+.1f} %, at most "
        f"{100 * LIMIT:.0f} %). The stage that does not fit is the rollout: replayed "
        f"{duration(round(rollout_ns))}, measured {duration(step.rollout.wall_ns)}. "
        f"{_why_not(step.rollout.slots)}"
    )


def _why_not(slots: int | None) -> str:
    """Return a sentence on the models that were tried and did not fit."""
    if slots is None:
        return (
            "The tokens of its generations do not explain their times, if replicas serve all requests at "
            "once. Fix: if requests wait in front of a replica, record each wait as a span `queue`"
        )
    return (
        "The tokens of its generations do not explain their times, neither with the queue in front of "
        f"replicas that serve {slots} at once, nor if these serve all requests at once"
    )
