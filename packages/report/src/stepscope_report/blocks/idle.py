"""Idle time of processes as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import LISTED, count, duration, percent_of, say_profiled, starred
from stepscope_report.model import StepReport
from stepscope_report.table import grouped
from stepscope_report.tables.idle import Idle


def idle_blocks(rows: Sequence[Idle], report: StepReport) -> Iterator[Block]:
    """Yield a row for each process, or for many of them the most idle one of each role."""
    window_ns = report.breakdown.window_ns
    if not rows or not window_ns:
        return
    roles = grouped(rows, lambda row: row.role).values()
    shown = rows if len(rows) <= LISTED else [max(own, key=lambda row: row.idle_ns) for own in roles]
    note = "Likely causes: what others did while the process did nothing. In collectives: by its trace."
    if len(shown) < len(rows):
        note = f"Of each role the most idle of {count(len(rows), 'process')}. {note}"
    note = f"{note} {say_profiled(*(row.profiled for row in shown))}".rstrip()
    columns = ("process", ">busy", ">idle", ">%", "it probably waited for", "in collectives")
    yield TextTable("Idle", columns, tuple(_cells(row, window_ns) for row in shown), note)


def _cells(row: Idle, window_ns: int) -> tuple[str, ...]:
    times = (duration(row.busy_ns), duration(row.idle_ns), percent_of(row.idle_ns, window_ns))
    return starred(row.process, row.profiled), *times, say_causes(row), say_collectives(row)


def say_causes(row: Idle, most: int = 3) -> str:
    """Return `rollout 2.06 s, slowest rank 196 ms (compute_log_prob), others 52.0 ms`: by kind, the longest
    first.
    """
    named, others_ns = name_causes(row, most)
    return ", ".join([*named, *([f"others {duration(others_ns)}"] if others_ns else [])])


def name_causes(row: Idle, most: int) -> tuple[list[str], int]:
    """Return the longest kinds of causes in words, and the time of the others in sum."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for cause in row.causes:
        by_kind[cause.kind][cause.stage or ""] += cause.wall_ns
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind].total())
    parts = []
    for kind in kinds[:most]:
        stages = [stage for stage, _ in by_kind[kind].most_common(1) if stage]
        named = f" ({', '.join(stages)})" if stages and kind in ("slowest rank", "other work") else ""
        parts.append(f"{kind} {duration(by_kind[kind].total())}{named}")
    return parts, sum(by_kind[kind].total() for kind in kinds[most:])


def say_collectives(row: Idle) -> str:
    """Return `163 ms (128 ms before all were there: actor 3)`. Empty if no trace says it."""
    if row.collective_ns is None:
        return ""
    if not row.skew_ns:
        return duration(row.collective_ns)
    last = "" if row.awaited is None else f": {row.awaited}"
    return f"{duration(row.collective_ns)} ({duration(row.skew_ns)} before all were there{last})"
