"""Advice on a process that is slower than the others of its role."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from stepscope_report.advice import Advice, Evidence, SettingChange
from stepscope_report.advice.remedies import changes
from stepscope_report.formatting import count, duration
from stepscope_report.sections.stages import Share, Stage
from stepscope_report.spans import GENERATES, ROLLOUT

_LOADS_DATA = re.compile(
    r"^(load|fetch|next)$|^(load|fetch|read|next|get)_\w*(data|batch|sample)|data_?load", re.IGNORECASE
)
"""Names of stages that fetch training data."""
_STRAGGLERS = frozenset({"late-rank", "slow-rank", "slow-replica", "slow-host", "uneven-batch"})


def straggler(evidence: Evidence) -> Advice | None:
    """Advise if a process takes 25 % longer than others of its role, or if others wait for it, and this costs
    at least 2 % of the step.
    """
    cause = next((cause for cause in evidence.causes if cause.kind in _STRAGGLERS), None)
    if cause is None or cause.process is None:
        return None
    name, role = cause.process.name, cause.role or cause.process.role
    because = [cause.sentence, *cause.evidence]
    stage = next(
        (stage for stage in evidence.stages if (stage.role, stage.title) == (role, cause.stage)), None
    )
    if stage is not None and stage.uneven:
        profiled = any(share.profiled for share in stage.processes if share.process == name)
        because.append(
            "a profiler recorded all processes of this comparison; those without a profiler are left out"
            if profiled
            else "no profiler recorded this process, though it recorded some of the others"
        )
    more = "has more to do" if cause.kind == "uneven-batch" else "is slower"
    return Advice(
        rule="straggler",
        what=f"{name} comes later than the others"
        if cause.stage is None
        else f"{name} {more} than the others in {role} {cause.stage}",
        because=tuple(because),
        do=_remedy(name, role, cause.stage),
        saves_ns=cause.ns,
        settings=_changes(role, evidence),
    )


def _remedy(name: str, role: str, stage: str | None) -> str:
    if stage is None:
        return f"see what {name} did before, such as fetching data; a span around that names it here"
    if role in GENERATES:
        return "balance requests by length and load, not in turn"
    if role in ROLLOUT:
        return "spread its calls over the others; if it is always that process, look at its host"
    if _LOADS_DATA.search(stage):
        return "let its data loader prefetch in more workers; if it is always that rank, look at its storage"
    return "balance the batch by tokens, not by samples; if it is always that rank, look at its host"


def _changes(role: str, evidence: Evidence) -> tuple[SettingChange, ...]:
    if role in GENERATES:
        return changes("straggler: rollout", evidence)
    return () if role in ROLLOUT else changes("straggler: training", evidence)


def uneven_profiling(evidence: Evidence) -> Advice | None:
    """Advise if a profiled process is slower than processes of its role that ran without a profiler, so that
    the profiler may be the reason.
    """
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
    """Time by which one process exceeds the processes that it is compared with, in one stage."""

    stage: Stage
    slowest: Share
    compared: Sequence[Share]

    @property
    def mean_ns(self) -> int:
        return sum(share.worked_ns for share in self.compared) // len(self.compared)

    @property
    def lost_ns(self) -> int:
        return self.slowest.worked_ns - self.mean_ns


def _comparable(evidence: Evidence) -> list[Stage]:
    return [
        stage
        for stage in evidence.stages
        if len(stage.processes) > 1 and not stage.waits and not _cut_off(stage, evidence)
    ]


def _is_large(gap: _Gap, evidence: Evidence) -> bool:
    large = gap.lost_ns * 50 >= evidence.breakdown.window_ns
    return large and gap.slowest.worked_ns * 4 >= gap.mean_ns * 5


def _gap_to_unprofiled(stage: Stage) -> _Gap:
    profiled = [share for share in stage.processes if share.profiled]
    slowest = max(profiled, key=lambda share: share.worked_ns)
    return _Gap(stage, slowest, [share for share in stage.processes if not share.profiled])


def _cut_off(stage: Stage, evidence: Evidence) -> bool:
    """Return True if calls of the stage were cut off because a recording ended early. The processes of the
    stage cannot be compared then.
    """
    if any(
        (span.role, span.stage) == (stage.role, stage.stage) and span.process in evidence.cut
        for span in evidence.health.open_spans
    ):
        return True
    cut = any(share.process in evidence.cut for share in stage.processes)
    return cut and len({share.calls for share in stage.processes}) > 1
