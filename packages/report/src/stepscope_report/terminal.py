"""Reports and comparisons as tables for a terminal, 100 columns wide, and tables as Markdown.

Colour alone carries no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope_report.block import Block, Listing, Remarks, TextTable
from stepscope_report.diff import (
    Change,
    Diff,
    KernelChange,
    KernelDiff,
    ShapeChange,
    Side,
    diff,
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

_SHARE = re.compile(r" (\S+ %)$")
ROWS = 2 * LISTED
"""Number of rows that are printed of a table that may be cut; the others are counted."""


def draw(block: Block) -> RenderableType:
    if isinstance(block, TextTable):
        return _cut_table(block)
    if isinstance(block, Listing):
        return listing(block.title, block.lines)
    if isinstance(block, Remarks):
        return _remarks(block)
    return Text(f"\n{plain(block.text)}")


def _cut_table(block: TextTable) -> RenderableType:
    if not block.noun or len(block.rows) <= ROWS:
        return table(block.title, block.columns, block.rows, block.note)
    more = f"{count(len(block.rows) - ROWS, block.noun)} more in --json."
    return table(block.title, block.columns, block.rows[:ROWS], f"{more} {block.note}".rstrip())


def _remarks(block: Remarks) -> RenderableType:
    parts: list[RenderableType] = [Text(""), Text(plain(block.title), style="bold")]
    for remark in block.remarks:
        parts.append(Padding(Text(plain(remark.text)), (0, 0, 0, 2)))
        details = "\n".join(map(plain, remark.details))
        parts.append(Padding(Text(details, style="dim"), (0, 0, 0, 4)))
    return Group(*parts)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = ""
) -> RenderableType:
    """Return a titled table. A column whose name starts with `>` holds numbers and is right-aligned.

    No digit is lost. In a narrow terminal, headings and texts take more lines. If that is not enough, gaps
    become narrower, words are broken, and shares are put below their times; at last, numbers take several
    lines too.
    """
    return _titled(title, _Grid(columns, [[plain(cell) for cell in row] for row in rows]), note)


class _Grid:
    def __init__(self, columns: Sequence[str], rows: list[list[str]]) -> None:
        self.headings = [plain(name.lstrip(">")) for name in columns]
        self.numbers = [name.startswith(">") for name in columns]
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gaps = len(self.headings) - 1
        rows, gap, least = self.rows, 3, self._least(self.rows)
        whole = [max(pair) for pair in zip(least, self._longest_words(), strict=True)]
        if sum(whole) + gaps <= options.max_width:  # narrower gaps rather than broken names
            least, gap = whole, 3 if sum(whole) + gap * gaps <= options.max_width else 1
        if sum(least) + gap * gaps > options.max_width:
            rows = [[_SHARE.sub(r"\n\1", cell) for cell in row] for row in rows]
            gap, least = 1, self._least(rows)
        if sum(least) + gap * gaps > options.max_width:
            least = [1] * len(least)
        yield self._drawn(rows, gap, self._widths(rows, least, options.max_width - gap * gaps))

    def _least(self, rows: list[list[str]]) -> list[int]:
        """Return the smallest widths at which no word of a heading and no line of a number is broken."""
        words = [heading.split() for heading in self.headings]
        for row in rows:
            for at, cell in enumerate(row):
                if self.numbers[at]:
                    words[at] += cell.split("\n")
        return [max(map(cell_len, parts), default=0) for parts in words]

    def _longest_words(self) -> list[int]:
        columns = zip(self.headings, *self.rows, strict=True)
        return [
            max(cell_len(word) for cell in column for word in (cell.split() or [""])) for column in columns
        ]

    def _widths(self, rows: list[list[str]], least: list[int], room: int) -> list[int]:
        """Return the widths that the columns need; if there is not enough room, the widest columns are
        narrowed.
        """
        columns = zip(self.headings, *rows, strict=True)
        widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
        while sum(widths) > room:
            spare = [at for at, width in enumerate(widths) if width > least[at]]
            if not spare:
                break
            widths[max(spare, key=widths.__getitem__)] -= 1
        return widths

    def _drawn(self, rows: list[list[str]], gap: int, widths: list[int]) -> Table:
        grid = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, gap // 2),
            pad_edge=False,
            show_edge=False,
            header_style="bold",
        )
        for heading, number, width in zip(self.headings, self.numbers, widths, strict=True):
            grid.add_column(
                Text(heading), justify="right" if number else "left", overflow="fold", width=width
            )
        for row in rows:
            grid.add_row(*map(Text, row))
        return grid


def listing(title: str, lines: Sequence[str]) -> RenderableType:
    """Return a titled list, cut at `LISTED` lines."""
    shown = [Text(f"- {plain(line)}") for line in lines[:LISTED]]
    if len(lines) > LISTED:
        shown.append(Text(f"- and {len(lines) - LISTED:,} more (--json has all)"))
    return _titled(title, Group(*shown), "")


def _titled(title: str, body: RenderableType, note: str) -> RenderableType:
    parts: list[RenderableType] = [
        Text(""),
        Text(plain(title), style="bold"),
        Padding(body, (0, 0, 0, 2), expand=False),
    ]
    if note:
        lines = "\n".join(map(plain, note.split("\n")))
        parts.append(Padding(Text(lines, style="dim"), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. `>` before a column's name aligns it to the right."""
    head = [column.removeprefix(">") for column in columns]
    rule = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = (head, rule, *([_cell(text) for text in row] for row in rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|")


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
_KERNEL_COLUMNS = ("role", "stage", "operator or kernel", "kind", ">A", ">B", ">B - A", ">calls")
CHANGES = 4
"""Number of changes from the previous step that are listed for each step, the largest first."""


def render_diff(comparison: Diff) -> RenderableType:
    """Return the change of the whole step, then of each line. If there are many lines, the smallest changes
    are summed.
    """
    parts = [
        _diff_head(comparison),
        table("What changed", COLUMNS, _diff_rows(comparison), _diff_note(comparison)),
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
    grown = comparison.kernels
    if grown is not None:
        parts += [markdown_table(_KERNEL_COLUMNS, _kernel_rows(grown)), _kernel_note(grown)]
    return "\n\n".join(parts)


def _kernel_rows(grown: KernelDiff) -> list[tuple[str, ...]]:
    """Return a row for each change, and below an operator one for each of its shapes."""
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
    note = (
        "A and B: share of the step; B - A adds up. % of A: of A's step. calls, mean call: A > B.\n"
        f"{BESIDE}: the capture, outside of the step."
    )
    if len(comparison.a.steps) > 1 or len(comparison.b.steps) > 1:
        note += " Per step, by the mean."
    if len(comparison.a.steps) > 1 and len(comparison.b.steps) > 1:
        note += " *: A's steps and B's do not overlap in this line."
    return note


def _diff_row(change: Change, total_ns: int) -> tuple[str, ...]:
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


def _smaller_changes(changes: Sequence[Change], total_ns: int) -> tuple[str, ...]:
    a_ns, b_ns = sum(change.a.wall_ns for change in changes), sum(change.b.wall_ns for change in changes)
    return (
        "", count(len(changes), "smaller change"), duration(a_ns), duration(b_ns), signed(b_ns - a_ns),
        percentage(b_ns - a_ns, total_ns), "", "",
    )  # fmt: skip
