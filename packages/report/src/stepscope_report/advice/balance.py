"""Advice on a process that is slower than the others of its role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope_report.advice.evidence import Advice, Evidence
from stepscope_report.advice.remedies import changes
from stepscope_report.advice.settings import SettingChange
from stepscope_report.formatting import count, duration
from stepscope_report.sections.stages import Share, Stage
from stepscope_report.spans import GENERATES, ROLLOUT


def straggler(evidence: Evidence) -> Advice | None:
    """Advise if one process of a role is busy 1.2 times the mean of its stage, and that is 2 % of the step.

    Its calls then take that much longer too, in sum or each: of calls that run at once, busy time alone may
    only tell how well they overlap. A process that a profiler recorded is compared with other recorded ones.
    """
    gaps = [gap for stage in _comparable(evidence) for gap in _gaps(stage) if _is_large(gap, evidence)]
    worst = max(gaps, key=lambda gap: gap.lost_ns, default=None)
    if worst is None:
        return None
    stage, slowest = worst.stage, worst.slowest
    because = [
        (
            f"busy for {duration(slowest.worked_ns)}, {duration(worst.mean_ns)} on average over "
            f"{count(len(worst.compared), 'process')}"
        ),
        *_calls(worst),
    ]
    if stage.uneven and slowest.profiled:
        because.append("a profiler recorded each of these; the others are not compared with it")
    elif stage.uneven:
        because.append("no profiler recorded it, though some of the others")
    return Advice(
        rule="straggler",
        what=f"{slowest.process} is slower than the others in {stage.role} {stage.title}",
        because=tuple(because),
        do=(
            "balance requests by length and load, not in turn"
            if stage.role in GENERATES
            else "spread its calls over the others; if it is always that process, look at its host"
            if stage.role in ROLLOUT
            else "balance the batch by tokens, not by samples; if it is always that rank, look at its host"
        ),
        saves_ns=worst.saves_ns,
        settings=_changes(stage, evidence),
    )


def _changes(stage: Stage, evidence: Evidence) -> tuple[SettingChange, ...]:
    if stage.role in GENERATES:
        return changes("straggler: rollout", evidence)
    return () if stage.role in ROLLOUT else changes("straggler: training", evidence)


def _calls(gap: _Gap) -> list[str]:
    """Return the number of its calls and their mean, beside the others': more work, or slower work."""
    slowest, calls = gap.slowest, sum(share.calls for share in gap.others)
    if not (calls and slowest.calls):
        return []
    mean_ns = sum(share.total_ns for share in gap.others) // calls
    return [
        (
            f"{count(slowest.calls, 'call')} of {duration(slowest.total_ns // slowest.calls)} on average, "
            f"the others {round(calls / len(gap.others)):,} of {duration(mean_ns)}"
        )
    ]


def uneven_profiling(evidence: Evidence) -> Advice | None:
    """Advise if a process would be a straggler, had a profiler recorded the others as well."""
    gaps = [
        gap
        for stage in _comparable(evidence)
        if stage.uneven
        for gap in [_gap_to_unprofiled(stage)]
        if _is_large(gap, evidence)
    ]
    worst = max(gaps, key=lambda gap: gap.lost_ns, default=None)
    if worst is None:
        return None
    stage, slowest = worst.stage, worst.slowest
    alike = (
        "ranks: all, or no engines in the capture"
        if any(one.engine and one.name == slowest.process for one in evidence.profiling.recorded)
        else "ranks: all, or profiler: off"
    )
    return Advice(
        rule="uneven-profiling",
        what=(
            f"{slowest.process} took longer in {stage.role} {stage.title}, and a profiler slowed it and not "
            "the others"
        ),
        because=(
            (
                f"busy for {duration(slowest.worked_ns)}; {duration(worst.mean_ns)} on average over "
                f"{count(len(worst.compared), 'process')} without a profiler"
            ),
        ),
        do=(
            "this step cannot tell a slow process from its profiler: record all processes of the role or "
            f"none (roles.{stage.role}: {alike})"
        ),
    )


class _Gap(NamedTuple):
    """The excess of one process over those it is compared with, in one stage."""

    stage: Stage
    slowest: Share
    compared: Sequence[Share]
    """The shares that make the mean; the slowest share may be one of them."""

    @property
    def mean_ns(self) -> int:
        return sum(share.worked_ns for share in self.compared) // len(self.compared)

    @property
    def lost_ns(self) -> int:
        return self.slowest.worked_ns - self.mean_ns

    @property
    def others(self) -> Sequence[Share]:
        return [share for share in self.compared if share is not self.slowest]

    @property
    def saves_ns(self) -> int:
        """The most that it gains if it becomes as the others are on average: by busy time, by work, or by the
        time of a call. It may be slow in fewer calls, or in more of them at once.
        """
        slowest, others = self.slowest, self.others
        total_ns, calls = sum(share.total_ns for share in others), sum(share.calls for share in others)
        ratios = [
            sum(share.worked_ns for share in others) / (len(others) * slowest.worked_ns),
            total_ns / (len(others) * slowest.total_ns),
        ]
        if calls and slowest.calls:
            ratios.append(total_ns * slowest.calls / (calls * slowest.total_ns))
        return round(slowest.worked_ns * (1 - min(ratios)))

    @property
    def works_more(self) -> bool:
        """Return whether its calls also take 1.2 times the mean: in sum, or each."""
        total_ns = sum(share.total_ns for share in self.compared)
        calls = sum(share.calls for share in self.compared)
        in_sum = self.slowest.total_ns * len(self.compared) * 5 >= total_ns * 6
        return in_sum or self.slowest.total_ns * calls * 5 >= total_ns * self.slowest.calls * 6


def _comparable(evidence: Evidence) -> list[Stage]:
    return [
        stage
        for stage in evidence.stages
        if len(stage.processes) > 1 and not stage.waits and not _cut_off(stage, evidence)
    ]


def _is_large(gap: _Gap, evidence: Evidence) -> bool:
    large = gap.lost_ns * 50 >= evidence.breakdown.window_ns
    return large and gap.slowest.worked_ns * 5 >= gap.mean_ns * 6 and gap.works_more


def _gaps(stage: Stage) -> list[_Gap]:
    """Return the gap of the busiest process to the mean of all.

    If profiling differs, return two gaps: the busiest profiled process against the profiled ones, and the
    busiest of the others against the others. If the others are too few, their mean is of all: a process
    without a profiler that is slower than a profiled one is slow.
    """
    profiled = [share for share in stage.processes if share.profiled]
    others = [share for share in stage.processes if not share.profiled]
    if not (profiled and others):
        return [_gap(stage, stage.processes, stage.processes)]
    gaps = [_gap(stage, others, others if len(others) > 1 else stage.processes)]
    return [*gaps, _gap(stage, profiled, profiled)] if len(profiled) > 1 else gaps


def _gap_to_unprofiled(stage: Stage) -> _Gap:
    profiled = [share for share in stage.processes if share.profiled]
    return _gap(stage, profiled, [share for share in stage.processes if not share.profiled])


def _gap(stage: Stage, candidates: Sequence[Share], compared: Sequence[Share]) -> _Gap:
    slowest = max(candidates, key=lambda share: share.worked_ns)
    return _Gap(stage, slowest, compared)


def _cut_off(stage: Stage, evidence: Evidence) -> bool:
    """Return whether a recording that ended early cut off calls of the stage. These do not compare."""
    if any(
        (span.role, span.stage) == (stage.role, stage.stage) and span.process in evidence.cut
        for span in evidence.health.open_spans
    ):
        return True
    cut = any(share.process in evidence.cut for share in stage.processes)
    return cut and len({share.calls for share in stage.processes}) > 1
