"""Numbers that the trainer logged, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stepscope_report.formatting import count
from stepscope_report.sections import Section
from stepscope_report.table import Block, TextTable

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

_LEFT_OUT = re.compile(r"[/_](min|max|std)$|^timing_per_token")
"""Names of numbers that are not shown: the minimum, maximum and deviation of a mean, and times per token."""
_FIRST = (
    "reward|score",
    "throughput|^(response|prompt)_length/|num_turns",
    "^timing",
    "loss|entropy|kl$",
)
"""Names of numbers that are shown first, in groups, because a terminal cuts off a long table."""


def metrics_blocks(metrics: Mapping[str, float], report: StepReport) -> Iterator[Block]:
    """Yield the numbers that the trainer logged, first those named in `_FIRST`. Extremes of a mean are left
    out.
    """
    if not metrics:
        return
    names = sorted((name for name in metrics if not _LEFT_OUT.search(name)), key=_group)
    left_out = len(metrics) - len(names)
    note = f"{count(left_out, 'other number')} (extremes, times for each token): --json" if left_out else ""
    rows = tuple((name, f"{metrics[name]:,.6g}") for name in names)
    yield TextTable("Logged by the trainer", ("name", ">value"), rows, note, noun="number")


def _group(name: str) -> int:
    return next((at for at, pattern in enumerate(_FIRST) if re.search(pattern, name)), len(_FIRST))


METRICS = Section(
    name="metrics",
    title="Logged by the trainer",
    compute=lambda sources: sources.timeline.metrics,
    terminal=metrics_blocks,
)
