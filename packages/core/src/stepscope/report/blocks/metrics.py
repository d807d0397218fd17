"""Numbers that the trainer logged, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from stepscope.report.blocks.block import Block, TextTable
from stepscope.report.formatting import count
from stepscope.report.model import StepReport

_LEFT_OUT = re.compile(r"[/_](min|max|std)$|^timing_per_token")
"""Names of numbers that only fill the table: extremes of a mean that is there, and quotients of times."""


def metrics_blocks(metrics: Mapping[str, float], report: StepReport) -> Iterator[Block]:
    """Yield the trainer's own numbers without the extremes, in its order."""
    del report
    if not metrics:
        return
    names = [name for name in metrics if not _LEFT_OUT.search(name)]
    left_out = len(metrics) - len(names)
    note = f"{count(left_out, 'other number')} (extremes, times for each token): --json" if left_out else ""
    rows = tuple((name, f"{metrics[name]:,.6g}") for name in names)
    yield TextTable("Logged by the trainer", ("name", ">value"), rows, note, noun="number")
