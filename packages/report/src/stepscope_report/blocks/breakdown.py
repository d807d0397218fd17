"""The account of a step as tables: stages, gaps, and stages at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import LISTED, duration, percent_of, percents
from stepscope_report.model import StepReport
from stepscope_report.tables.breakdown import Breakdown, Line
from stepscope_report.tables.gaps import GAPS, LEAST, name_gap

BESIDE = "+ opening, closing"
"""The line below the account: what the capture took before the step and after it."""


def breakdown_blocks(breakdown: Breakdown, report: StepReport) -> Iterator[Block]:
    """Yield the account, its gaps, and the stages that ran at the same time."""
    yield account_table(breakdown)
    if gaps := gap_table(breakdown):
        yield gaps
    if breakdown.overlaps:
        yield overlap_table(breakdown, LISTED // 2)


def account_table(breakdown: Breakdown) -> TextTable:
    """Return the share of each stage. The lines add up to the step."""
    shares = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)
    rows = [_account_row(line, share) for line, share in zip(breakdown.lines, shares, strict=True)]
    whole_ns = breakdown.window_ns
    rows.append(("", "step", duration(whole_ns), percent_of(whole_ns, whole_ns), "", ""))
    note = "alone: not shared with other stages. active: how long it went on at all, billed to it or not."
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    if beside_ns:
        rows.append(("", BESIDE, duration(beside_ns), "", "", ""))
        note += f"\n{say_outside(breakdown)}"
    if breakdown.left_out:
        note += f"\n{say_left_out(breakdown)}"
    columns = ("role", "stage", ">wall", ">%", ">alone", ">active")
    return TextTable("Where it went", columns, tuple(rows), note)


def _account_row(line: Line, share: str) -> tuple[str, ...]:
    if line.kind != "stage":
        return "", line.kind, duration(line.wall_ns), share, "", ""
    name, times = (line.stage or "") + waiting(line), (line.alone_ns, line.active_ns)
    return line.role or "", name, duration(line.wall_ns), share, *map(duration, times)


def gap_table(breakdown: Breakdown) -> TextTable | None:
    """Return the largest gaps and the sum of the others. None if unaccounted time is next to nothing."""
    unaccounted_ns = sum(gap.wall_ns for gap in breakdown.gaps)
    if unaccounted_ns * LEAST < max(breakdown.window_ns, 1):
        return None
    largest, rest = breakdown.gaps[:GAPS], breakdown.gaps[GAPS:]
    parts = [(name_gap(gap), gap.wall_ns, gap.count) for gap in largest]
    if rest:
        parts.append(("elsewhere", sum(gap.wall_ns for gap in rest), sum(gap.count for gap in rest)))
    shares = percents([ns for _, ns, _ in parts], breakdown.window_ns)
    rows = tuple(
        (duration(ns), share, f"{number:,}", name)
        for (name, ns, number), share in zip(parts, shares, strict=True)
    )
    return TextTable("Unaccounted: the largest gaps", (">wall", ">%", ">gaps", "where no span ran"), rows)


def overlap_table(breakdown: Breakdown, most: int) -> TextTable:
    """Return the stages that an instant was split among, the longest `most` of them by name."""
    longest, rest = breakdown.overlaps[:most], breakdown.overlaps[most:]
    shares = percents([overlap.wall_ns for overlap in longest], breakdown.window_ns)
    rows = [
        (duration(overlap.wall_ns), share, " + ".join(" ".join(label) for label in overlap.stages))
        for overlap, share in zip(longest, shares, strict=True)
    ]
    if rest:
        rows.append(
            (duration(sum(overlap.wall_ns for overlap in rest)), "", f"{len(rest)} other combinations")
        )
    return TextTable("At the same time (split equally above)", (">wall", ">%", "stages"), tuple(rows))


OVERVIEW_NOTES = (
    "%: of the step (took). uncaptured: the median of steps near it that were not captured.",
    f"{BESIDE}: the capture, outside of the step.",
)


def overview_cells(report: StepReport) -> tuple[str, ...]:
    """Return what a step took, uncaptured ones took, and its capture took beside it; what is unaccounted, and
    `yes` or `no`: whether it is complete.
    """
    breakdown, health = report.breakdown, report.health
    usual_ns = None if report.baseline is None else report.baseline.p50_ns
    times = (breakdown.window_ns, usual_ns, breakdown.opening_ns + breakdown.closing_ns)
    unaccounted = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)[-1]
    early = "" if health.user_error is None else ", ended early"
    return *map(duration, times), f"{unaccounted} %", f"{'yes' if health.complete else 'no'}{early}"


def say_outside(breakdown: Breakdown) -> str:
    """Return the time of the capture before and after the step, which other steps do not pay."""
    return (
        f"The capture took {duration(breakdown.opening_ns)} to open before the step and "
        f"{duration(breakdown.closing_ns)} to close after it; other steps do not pay that."
    )


def waiting(line: Line) -> str:
    """Return the mark behind the name of a stage that waits."""
    return " (waiting)" if line.waits else ""


def say_left_out(breakdown: Breakdown) -> str:
    """Name the processes that are in no line, the first few of them."""
    names = breakdown.left_out
    more = "" if len(names) <= LISTED else f" and {len(names) - LISTED:,} more"
    return f"Not in here, because their clocks are unaligned: {', '.join(names[:LISTED])}{more}"
