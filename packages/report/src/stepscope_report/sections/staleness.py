"""*Staleness*: age of the trajectories that a step trains on, in steps and in versions of the policy
(asynchronous RL).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope_report.accounting import rank_of
from stepscope_report.formatting import count
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.spans import MOVES_WEIGHTS
from stepscope_report.table import Block, TextTable
from stepscope_report.timeline import Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

WORST = 10


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles, by nearest rank, of how far the trajectories are behind the step."""

    known: int
    """Number of trajectories whose lag is known."""
    p50: int
    p90: int
    max: int


class StaleTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    trajectory: str
    begun_step: int | None
    """Number of the step under which the trajectory began. None if unknown."""
    policy_versions: tuple[int, ...]
    """All versions that the trajectory's spans state, ascending. Several if the weights changed while the
    trajectory ran."""
    steps: int | None
    """Number of the consuming step minus `begun_step`. None if unknown."""
    versions: int | None
    """Version of the weights that are trained with the trajectory, minus the trajectory's lowest version.
    None if unknown."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int
    """Number of trajectories that this step consumes: the trajectories named by `consume`. If none is named,
    the trajectories of the step's spans."""
    policy_version: int | None
    """Highest version of the weights that are trained with a trajectory. None if unknown."""
    steps: Lag | None
    versions: Lag | None
    mixed: int
    """Number of trajectories that were written by several versions of the weights."""
    worst: tuple[StaleTrajectory, ...]
    """The stalest trajectories, the stalest first. Trajectories without a lag that were written by a single
    version are left out."""


class _Consumed:
    def __init__(self) -> None:
        self.begun: int | None = None
        self.versions: set[int] = set()
        self.under: int | None = None

    def see(self, begun: int | None, version: int | None) -> None:
        if begun is not None:
            self.begun = begun if self.begun is None else min(self.begun, begun)
        if version is not None:
            self.versions.add(version)


def step_staleness(timeline: Timeline) -> Staleness | None:
    """Return the staleness of the step. None if the step recorded no `consume` and no trajectory is known to
    be stale or written by several versions, as in synchronous RL.
    """
    consumed = _consumed(timeline)
    trainer = _trainer_version(timeline)
    rows = [_row(name, trajectory, timeline.step, trainer) for name, trajectory in consumed.items()]
    steps = sorted(row.steps for row in rows if row.steps is not None)
    versions = sorted(row.versions for row in rows if row.versions is not None)
    mixed = sum(len(row.policy_versions) > 1 for row in rows)
    if not (timeline.consumed or any(steps) or any(versions) or mixed):
        return None
    under = [trajectory.under for trajectory in consumed.values() if trajectory.under is not None]
    return Staleness(
        trajectories=len(rows),
        policy_version=max(under, default=trainer),
        steps=_lag(steps),
        versions=_lag(versions),
        mixed=mixed,
        worst=tuple(_worst(rows)),
    )


def trained_under(timeline: Timeline) -> dict[str, int | None]:
    """Return {consumed trajectory: version of the weights that are trained with the trajectory, or None if
    unknown}.
    """
    trainer = _trainer_version(timeline)
    return {name: trainer if one.under is None else one.under for name, one in _consumed(timeline).items()}


def _consumed(timeline: Timeline) -> dict[str, _Consumed]:
    consumed: dict[str, _Consumed] = {}
    for mark in timeline.consumed:
        if mark.trajectory is not None and mark.step == timeline.step:
            one = consumed.setdefault(mark.trajectory, _Consumed())
            # `mark.policy_version` is the trainer's version, and no version of the trajectory.
            version = (mark.attrs or {}).get("begun_version")
            one.see(mark.begun_step, version if isinstance(version, int) else None)
            one.under = None if mark.parent is None else timeline.spans[mark.parent].policy_version
    for span in timeline.spans:
        if span.trajectory is None or (span.step != timeline.step and span.trajectory not in consumed):
            continue
        if span.trajectory in consumed or not timeline.consumed:
            begun = timeline.step if span.stage == "trajectory" else None
            one = consumed.setdefault(span.trajectory, _Consumed())
            one.see(begun if span.begun_step is None else span.begun_step, span.policy_version)
    return consumed


def _trainer_version(timeline: Timeline) -> int | None:
    """Return the highest version that the step's spans outside of trajectories state. This version is used
    for `consume` calls outside of spans with a version. None if no span states a version.
    """
    versions = (
        span.policy_version
        for span in timeline.spans
        if span.trajectory is None and span.step == timeline.step and span.policy_version is not None
        if not MOVES_WEIGHTS.search(span.stage)  # a weight sync states the new version
    )
    return max(versions, default=None)


def _row(name: str, consumed: _Consumed, step: int, trainer: int | None) -> StaleTrajectory:
    under = trainer if consumed.under is None else consumed.under
    known = consumed.versions and under is not None
    return StaleTrajectory(
        trajectory=name,
        begun_step=consumed.begun,
        policy_versions=tuple(sorted(consumed.versions)),
        steps=None if consumed.begun is None else step - consumed.begun,
        versions=under - min(consumed.versions) if known and under is not None else None,
    )


def _lag(ascending: Sequence[int]) -> Lag | None:
    if not ascending:
        return None
    p50, p90 = (ascending[rank_of(percent, len(ascending))] for percent in (50, 90))
    return Lag(known=len(ascending), p50=p50, p90=p90, max=ascending[-1])


def _worst(rows: Sequence[StaleTrajectory]) -> list[StaleTrajectory]:
    stale = [row for row in rows if row.steps or row.versions or len(row.policy_versions) > 1]
    return sorted(stale, key=lambda row: (-(row.steps or 0), -(row.versions or 0), row.trajectory))[:WORST]


def staleness_blocks(staleness: Staleness | None, report: StepReport) -> Iterator[Block]:
    """Yield a table of how many steps and versions the consumed trajectories were behind, and a table of the
    stalest trajectories. Nothing if `staleness` is None.
    """
    if staleness is None:
        return
    lags = (("steps", staleness.steps), ("policy versions", staleness.versions))
    rows = tuple(
        (name, *(f"{number:,}" for number in (lag.known, lag.p50, lag.p90, lag.max)))
        for name, lag in lags
        if lag is not None
    )
    columns = ("behind by", ">trajectories", ">p50", ">p90", ">max")
    yield TextTable("Staleness", columns, rows, _said_consumed(staleness))
    if staleness.worst:
        columns = ("trajectory", "begun under", "policy versions", ">steps behind", ">versions behind")
        yield TextTable("Stalest trajectories", columns, tuple(map(_cells, staleness.worst)))


def _said_consumed(staleness: Staleness) -> str:
    consumed = f"{count(staleness.trajectories, 'trajectory')} consumed by this step"
    if staleness.policy_version is not None:
        consumed += f", under policy version {staleness.policy_version}"
    if staleness.mixed:
        consumed += f"; {staleness.mixed:,} written by several versions"
    return f"{consumed}."


def _cells(row: StaleTrajectory) -> tuple[str, ...]:
    begun = "-" if row.begun_step is None else f"step {row.begun_step}"
    versions = ", ".join(map(str, row.policy_versions)) or "-"
    behind = ("-" if number is None else f"{number:,}" for number in (row.steps, row.versions))
    return row.trajectory, begun, versions, *behind


STALENESS = Section(
    name="staleness",
    title="Staleness",
    compute=lambda sources: step_staleness(sources.timeline),
    terminal=staleness_blocks,
    page=ROLLOUT,
)
