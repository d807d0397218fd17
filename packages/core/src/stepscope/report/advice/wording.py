"""Shares of the step in words, and the reader whom advice speaks to."""

from __future__ import annotations

from stepscope.report.advice.evidence import Evidence
from stepscope.report.formatting import duration, percents


def is_unedited(evidence: Evidence) -> bool:
    """Return whether the reader can change the configuration alone, and no code."""
    return evidence.health.opened_by == "instrument"


def share_of_step(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {percentage_of(wall_ns, evidence.breakdown.window_ns)} of the step"


def percentage_of(part: int, whole: int) -> str:
    return f"{percents([part], whole)[0]} %"
