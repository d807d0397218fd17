"""Reports and comparisons as tables for a terminal, 100 columns wide, and comparisons as Markdown.

Colour alone carries no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope_report.diff import (
    Change,
    Diff,
    KernelChange,
    KernelDiff,
    ShapeChange,
    Side,
)
from stepscope_report.formatting import (
    LISTED,
    both,
    count,
    duration,
    moment,
    percentage,
    percents,
    plain,
    signed,
)
from stepscope_report.model import StepReport
from stepscope_report.report import SECTIONS
from stepscope_report.sections.advice import advice_blocks
from stepscope_report.sections.baseline import say_beside, say_usual
from stepscope_report.sections.breakdown import (
    BESIDE,
    OVERVIEW_NOTES,
    account_table,
    between_ns,
    overview_cells,
)
from stepscope_report.sections.health import (
    say_again,
    say_deaths,
    say_ended,
    say_incomplete,
    say_other_runs,
    say_recorder,
)
from stepscope_report.terminal_blocks import draw, markdown_table, table

# A step.


def render(report: StepReport) -> Group:
    sections = [section.blocks_of(report) for section in SECTIONS]
    added = [section.blocks() for section in report.added]
    return Group(_head(report), *map(draw, chain(*sections, *added)))


def render_short(report: StepReport) -> Group:
    """Return the duration of one step, what to do first, and where its time went."""
    first = advice_blocks(report.advice[:1], report)
    return Group(_head(report), *map(draw, (*first, account_table(report.breakdown, between_ns(report)))))


def render_overview(reports: Sequence[StepReport]) -> RenderableType:
    columns = (
        ">step", ">took", ">uncaptured", f">{BESIDE}", ">unaccounted", "largest stages", "complete"
    )  # fmt: skip
    return table("Steps", columns, list(map(_overview, reports)), "\n".join(OVERVIEW_NOTES))


def _overview(report: StepReport) -> list[str]:
    lines = report.breakdown.lines
    shares = zip(lines, percents([line.wall_ns for line in lines], report.breakdown.window_ns), strict=True)
    most = ", ".join(f"{line.stage} {share} %" for line, share in islice(shares, 2) if line.kind == "stage")
    *cells, complete = overview_cells(report)
    return [str(report.step), *cells, most, complete]


def _head(report: StepReport) -> Text:
    total_ns, window_ns = report.breakdown.total_ns, report.breakdown.window_ns
    with_capture = f"{duration(total_ns)} with opening and closing the capture"
    if report.cause is not None:
        took = f"{report.cause.sentence}. {with_capture}"
    else:
        took = f"{duration(window_ns)} ({with_capture})"
    if report.health.recorder is not None or report.tracer:
        took = duration(window_ns) if report.cause is None else report.cause.sentence
    health, baseline = report.health, report.baseline
    took = "; ".join(filter(None, (say_deaths(health), took)))
    lines = [plain(f"{report.name}, {moment(report.opened_ns)}: {took}")]
    lines += [say_recorder(health), say_ended(health), plain(say_incomplete(health)), say_again(health)]
    lines += [] if report.tracer else [say_usual(baseline, report.compared), say_beside(baseline)]
    lines.append(plain(say_other_runs(report)))
    return Text("\n".join(filter(None, lines)), style="bold")


# A comparison.

COLUMNS = ("role", "stage", ">A", ">B", ">B - A", ">% of A", ">calls", ">mean call")
_BESIDE = (">A", ">B", ">B - A", ">% of A")
_PHASES = "Times of the step that overlap the lines above."
_LABELS = "Ranges on the CPU by the labels around them. Those that changed most."
_KERNEL_COLUMNS = ("role", "stage", "operator or kernel", "kind", ">A", ">B", ">B - A", ">calls")


def render_diff(comparison: Diff) -> RenderableType:
    """Return the change of the whole step, then of each line. If there are many lines, the smallest changes
    are summed.
    """
    parts = [
        _diff_head(comparison),
        table("What changed", COLUMNS, _diff_rows(comparison), _diff_note(comparison)),
    ]
    parts += [
        table(title, (title[:-1].lower(), *_BESIDE), rows, note)
        for title, rows, note in _overlapping(comparison)
    ]
    grown = comparison.kernels
    if grown is not None:
        parts.append(
            table("What changed in the traces", _KERNEL_COLUMNS, _kernel_rows(grown), _kernel_note(grown))
        )
    return Group(*parts)


def diff_markdown(comparison: Diff) -> str:
    head = "  \n".join(_diff_head(comparison).plain.splitlines())
    parts = [head, markdown_table(COLUMNS, _diff_rows(comparison)), _diff_note(comparison)]
    for title, rows, note in _overlapping(comparison):
        parts += [markdown_table((title[:-1].lower(), *_BESIDE), rows), note]
    grown = comparison.kernels
    if grown is not None:
        parts += [markdown_table(_KERNEL_COLUMNS, _kernel_rows(grown)), _kernel_note(grown)]
    return "\n\n".join(parts)


def _overlapping(comparison: Diff) -> Iterator[tuple[str, list[tuple[str, ...]], str]]:
    """Yield (title, rows, note) of the tables of times that overlap the lines of the account."""
    labels = [
        change for change in comparison.labels[:LISTED] if abs(change.delta_ns) >= _least_ns(comparison)
    ]
    tables = ("Phases", comparison.phases, _PHASES), ("Labels", labels, _LABELS)
    for title, changes, note in tables:
        if changes:
            yield title, [_diff_row(change, comparison.a.step_ns)[1:6] for change in changes], note


def _kernel_rows(grown: KernelDiff) -> list[tuple[str, ...]]:
    """Return a row for each change. A row for each of an operator's shapes follows the operator's row."""
    rows: list[tuple[str, ...]] = []
    for change in grown.changes:
        rows.append((change.role, change.stage or "", change.name, change.kind, *_kernel_numbers(change)))
        rows += [("", "", f"  {part.shapes}", "", *_kernel_numbers(part)) for part in change.shapes]
    return rows


def _kernel_numbers(change: KernelChange | ShapeChange) -> tuple[str, str, str, str]:
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


def _diff_rows(comparison: Diff) -> list[tuple[str, ...]]:
    shown = _worth_a_line(comparison)
    rest = comparison.changes[len(shown) :]
    rows = [_diff_row(change, comparison.a.step_ns) for change in shown]
    if rest:
        rows.append(_smaller_changes(rest, comparison.a.step_ns))
    whole = (duration(comparison.a.step_ns), duration(comparison.b.step_ns), signed(comparison.delta_ns))
    percent = percentage(comparison.delta_ns, comparison.a.step_ns)
    rows.append(("", "step", *whole, percent, "", ""))
    a_ns, b_ns = (side.opening_ns + side.closing_ns for side in (comparison.a, comparison.b))
    if a_ns or b_ns:
        rows.append(("", BESIDE, duration(a_ns), duration(b_ns), signed(b_ns - a_ns), "", "", ""))
    return rows


def _worth_a_line(comparison: Diff) -> Sequence[Change]:
    """Return all changes if they are few; else those that are not printed as 0.0 %."""
    if len(comparison.changes) <= LISTED:
        return comparison.changes
    least_ns = _least_ns(comparison)
    return [change for change in comparison.changes[: 2 * LISTED] if abs(change.delta_ns) >= least_ns]


def _least_ns(comparison: Diff) -> float:
    """Return the smallest change that is not printed as 0.0 %."""
    return max(comparison.a.step_ns, comparison.b.step_ns) / 2000


def _diff_head(comparison: Diff) -> Text:
    return Text(f"A: {_side(comparison.a)}\nB: {_side(comparison.b)}", style="bold")


def _side(side: Side) -> str:
    steps = (
        f"step {side.steps[0]}" if len(side.steps) == 1
        else f"{count(len(side.steps), 'step')}, {min(side.steps)} to {max(side.steps)}"
    )  # fmt: skip
    text = f"{steps} of run {plain(', '.join(side.runs))}: {duration(side.step_ns)}"
    text += " per step" if len(side.steps) > 1 else ""
    return text if side.complete else f"{text}; not complete, see stepscope report"


def _diff_note(comparison: Diff) -> str:
    note = "A and B: share of the step; B - A adds up. % of A: of A's step."
    if comparison.a.opening_ns or comparison.b.opening_ns:  # 0 in traces of other tools
        note += f" calls, mean call: A → B.\n{BESIDE}: the capture, outside of the step."
    if len(comparison.a.steps) > 1 or len(comparison.b.steps) > 1:
        note += " Per step, by the mean."
    if len(comparison.a.steps) > 1 and len(comparison.b.steps) > 1:
        note += " *: A's steps and B's do not overlap in this line."
    return note


def _diff_row(change: Change, total_ns: int) -> tuple[str, ...]:
    a, b = change.a, change.b
    called = change.kind == "stage" and (a.calls or b.calls)
    return (
        change.role or "",
        change.stage or change.kind,
        duration(a.wall_ns),
        duration(b.wall_ns),
        signed(change.delta_ns) + (" *" if change.apart else ""),
        percentage(change.delta_ns, total_ns),
        both(f"{a.calls:g}", f"{b.calls:g}") if called else "",
        both(duration(a.mean_ns), duration(b.mean_ns)) if called else "",
    )


def _smaller_changes(changes: Sequence[Change], total_ns: int) -> tuple[str, ...]:
    a_ns, b_ns = sum(change.a.wall_ns for change in changes), sum(change.b.wall_ns for change in changes)
    return (
        "", count(len(changes), "smaller change"), duration(a_ns), duration(b_ns), signed(b_ns - a_ns),
        percentage(b_ns - a_ns, total_ns), "", "",
    )  # fmt: skip
