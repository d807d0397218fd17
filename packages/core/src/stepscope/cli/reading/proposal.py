"""A smaller timeline of a step whose whole timeline is too large for a browser."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

from stepscope.report.sections import step_report
from stepscope.report.tables.stages import Share, Stage
from stepscope.timeline import load_step

EVENTS = 6_000_000
"""Some 1.5 GB of JSON, for a viewer in WebAssembly, which has 4 GB. Chosen, not measured."""


def proposal(step: Path, run_id: str) -> str:
    """Return what to merge instead: the slowest and the median rank of the most uneven stage."""
    stages = step_report(load_step(step, run_id=run_id)).stages
    start = "A browser may not open so many events."
    uneven = max(filter(_ranked, stages), key=_spread_ns, default=None)
    command = f"stepscope merge {shlex.quote(str(step))}"
    if uneven is None or not _spread_ns(uneven):
        return f"{start} Smaller: {command} --max-mb 200"
    slowest, median = _slowest(uneven.processes), _median(uneven.processes)
    what = f"{uneven.role} {uneven.title}: the slowest rank is {slowest.rank}, the median {median.rank}"
    return f"{start} Smaller: {command} --ranks {slowest.rank},{median.rank} ({what})"


def _ranked(stage: Stage) -> bool:
    ranks = {share.rank for share in stage.processes}
    return not stage.waits and None not in ranks and len(ranks) > 1


def _spread_ns(stage: Stage) -> int:
    """Return how much longer the slowest process was busy than the median one."""
    return _slowest(stage.processes).worked_ns - _median(stage.processes).worked_ns


def _slowest(shares: Sequence[Share]) -> Share:
    return max(shares, key=lambda share: share.worked_ns)


def _median(shares: Sequence[Share]) -> Share:
    middle = median_low(share.worked_ns for share in shares)
    return next(share for share in shares if share.worked_ns == middle)
