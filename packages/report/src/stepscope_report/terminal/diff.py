"""Changes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope_report.diff import (
    Change,
    Diff,
    KernelChange,
    KernelDiff,
    ShapeChange,
    Side,
    diff,
)
from stepscope_report.formatting import LISTED, both, count, duration, percentage, plain, signed
from stepscope_report.model import StepReport
from stepscope_report.sections.breakdown import BESIDE
from stepscope_report.terminal.layout import markdown_table, table

COLUMNS = ("role", "stage", ">A", ">B", ">B - A", ">% of A", ">calls", ">mean call")
KERNEL_COLUMNS = ("role", "stage", "operator or kernel", "kind", ">A", ">B", ">B - A", ">calls")
CHANGES = 4
"""Number of changes from the previous step that are listed for each step, the largest first."""


def render_diff(comparison: Diff) -> RenderableType:
    """Return the change of the whole step, then of each line. If there are many lines, the smallest changes
    are summed.
    """
    parts = [_head(comparison), table("What changed", COLUMNS, _rows(comparison), _note(comparison))]
    grown = comparison.kernels
    if grown is not None:
        parts.append(
            table("What changed in the traces", KERNEL_COLUMNS, _kernel_rows(grown), _kernel_note(grown))
        )
    return Group(*parts)


def diff_markdown(comparison: Diff) -> str:
    head = "  \n".join(_head(comparison).plain.splitlines())
    parts = [head, markdown_table(COLUMNS, _rows(comparison)), _note(comparison)]
    grown = comparison.kernels
    if grown is not None:
        parts += [markdown_table(KERNEL_COLUMNS, _kernel_rows(grown)), _kernel_note(grown)]
    return "\n\n".join(parts)


def _kernel_rows(grown: KernelDiff) -> list[tuple[str, ...]]:
    """Return a row for each change, and below an operator one for each of its shapes."""
    rows: list[tuple[str, ...]] = []
    for change in grown.changes:
        rows.append((change.role, change.stage or "", change.name, change.kind, *_numbers(change)))
        rows += [("", "", f"  {part.shapes}", "", *_numbers(part)) for part in change.shapes]
    return rows


def _numbers(change: KernelChange | ShapeChange) -> tuple[str, str, str, str]:
    calls = both(f"{change.a_calls:g}", f"{change.b_calls:g}")
    return duration(change.a_ns), duration(change.b_ns), signed(change.delta_ns), calls


def _kernel_note(grown: KernelDiff) -> str:
    parts = ["Per step and profiled process. An operator's time is its own, without those below it."]
    if any(change.shapes for change in grown.changes):
        parts.append("Below an operator: the shapes of inputs for which its time changed most.")
    if not (grown.compared or grown.only_a or grown.only_b):
        parts = ["Neither side has torch traces. Steps of the flight recorder have none."]
    elif not grown.changes:
        parts.append("No operator or kernel of both sides' traces changed.")
    for side, places in (("A", grown.only_a), ("B", grown.only_b)):
        named = [plain(" ".join(filter(None, place))) for place in places]
        if named:
            parts.append(f"Not compared, as {side} alone has traces: {', '.join(named)}.")
    return " ".join(parts)


def _rows(comparison: Diff) -> list[tuple[str, ...]]:
    shown = _worth_a_line(comparison)
    rest = comparison.changes[len(shown) :]
    rows = [_row(change, comparison.a.step_ns) for change in shown]
    if rest:
        rows.append(_rest(rest, comparison.a.step_ns))
    whole = (duration(comparison.a.step_ns), duration(comparison.b.step_ns), signed(comparison.delta_ns))
    percent = percentage(comparison.delta_ns, comparison.a.step_ns)
    rows.append(("", "step", *whole, percent, "", ""))
    a_ns, b_ns = (side.opening_ns + side.closing_ns for side in (comparison.a, comparison.b))
    if a_ns or b_ns:
        rows.append(("", BESIDE, duration(a_ns), duration(b_ns), signed(b_ns - a_ns), "", "", ""))
    return rows


def render_changes(reports: Sequence[StepReport]) -> RenderableType:
    """Return the change of each step from the previous one: of the whole step, and its largest changes."""
    rows = []
    for before, after in pairwise(reports):
        step_change = diff([before], [after])
        largest = [
            f"{' '.join(filter(None, (change.role, change.stage or change.kind)))} {signed(change.delta_ns)}"
            for change in step_change.changes[:CHANGES]
            if change.delta_ns
        ]
        percent = percentage(step_change.delta_ns, step_change.a.step_ns)
        rows.append(
            (f"{before.step} → {after.step}", signed(step_change.delta_ns), percent, ", ".join(largest))
        )
    note = "stepscope diff compares any two steps or runs, line by line."
    return table("What changed", ("steps", ">step", ">%", "the most"), rows, note)


def _worth_a_line(comparison: Diff) -> Sequence[Change]:
    """Return all changes if they are few; else those that are not printed as 0.0 %."""
    if len(comparison.changes) <= LISTED:
        return comparison.changes
    least_ns = max(comparison.a.step_ns, comparison.b.step_ns) / 2000
    return [change for change in comparison.changes[: 2 * LISTED] if abs(change.delta_ns) >= least_ns]


def _head(comparison: Diff) -> Text:
    return Text(f"A: {_side(comparison.a)}\nB: {_side(comparison.b)}", style="bold")


def _side(side: Side) -> str:
    steps = (
        f"step {side.steps[0]}" if len(side.steps) == 1
        else f"{count(len(side.steps), 'step')}, {min(side.steps)} to {max(side.steps)}"
    )  # fmt: skip
    text = f"{steps} of run {plain(', '.join(side.runs))}: {duration(side.step_ns)}"
    text += " per step" if len(side.steps) > 1 else ""
    return text if side.complete else f"{text}; not complete, see stepscope report"


def _note(comparison: Diff) -> str:
    note = (
        "A and B: share of the step; B - A adds up. % of A: of A's step. calls, mean call: A > B.\n"
        f"{BESIDE}: the capture, outside of the step."
    )
    if len(comparison.a.steps) > 1 or len(comparison.b.steps) > 1:
        note += " Per step, by the mean."
    if len(comparison.a.steps) > 1 and len(comparison.b.steps) > 1:
        note += " *: A's steps and B's do not overlap in this line."
    return note


def _row(change: Change, total_ns: int) -> tuple[str, ...]:
    a, b = change.a, change.b
    return (
        change.role or "",
        change.stage or change.kind,
        duration(a.wall_ns),
        duration(b.wall_ns),
        signed(change.delta_ns) + (" *" if change.apart else ""),
        percentage(change.delta_ns, total_ns),
        "" if change.kind != "stage" else both(f"{a.calls:g}", f"{b.calls:g}"),
        "" if change.kind != "stage" else both(duration(a.mean_ns), duration(b.mean_ns)),
    )


def _rest(changes: Sequence[Change], total_ns: int) -> tuple[str, ...]:
    a_ns, b_ns = sum(change.a.wall_ns for change in changes), sum(change.b.wall_ns for change in changes)
    return (
        "", count(len(changes), "smaller change"), duration(a_ns), duration(b_ns), signed(b_ns - a_ns),
        percentage(b_ns - a_ns, total_ns), "", "",
    )  # fmt: skip
