"""Numbers that the trainer logged, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stepscope_report.block import Block, TextTable
from stepscope_report.formatting import count
from stepscope_report.section import Section

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

_LEFT_OUT = re.compile(r"[/_](min|max|std)$|^timing_per_token")
"""Names of numbers that are left out: the extremes of a listed mean, and times divided by tokens."""
_FIRST = (
    "reward|score",
    "throughput|^(response|prompt)_length/|num_turns",
    "^timing",
    "loss|entropy|kl$",
)
"""Names that readers look for, in groups. These come first, because a terminal cuts the table."""


def metrics_blocks(metrics: Mapping[str, float], report: StepReport) -> Iterator[Block]:
    """Yield the trainer's own numbers without extremes: first the names that readers look for, then the
    others.
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
