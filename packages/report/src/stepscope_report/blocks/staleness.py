"""Staleness as tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import count
from stepscope_report.model import StepReport
from stepscope_report.tables.staleness import Staleness, StaleTrajectory


def staleness_blocks(staleness: Staleness | None, report: StepReport) -> Iterator[Block]:
    """Yield how far behind the consumed trajectories were, and the stalest ones."""
    if staleness is None:
        return
    lags = (("steps", staleness.steps), ("policy versions", staleness.versions))
    rows = tuple(
        (name, *(f"{number:,}" for number in (lag.known, lag.p50, lag.p90, lag.max)))
        for name, lag in lags
        if lag is not None
    )
    columns = ("behind by", ">trajectories", ">p50", ">p90", ">max")
    yield TextTable("Staleness", columns, rows, _consumed(staleness))
    if staleness.worst:
        columns = ("trajectory", "begun under", "policy versions", ">steps behind", ">versions behind")
        yield TextTable("Stalest trajectories", columns, tuple(map(_cells, staleness.worst)))


def _consumed(staleness: Staleness) -> str:
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
