"""*Where it went*: every nanosecond of the step, by role and stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.spans import SERVED
from stepscope_report.accounting import Interval, Label, Shares
from stepscope_report.charts import blend_short, draw_gantt
from stepscope_report.division import (
    STALLED,
    WINDOWS,
    Work,
    beside_step,
    divide_work,
    stalled_most_ns,
    work_of,
)
from stepscope_report.formatting import LISTED, count, duration, percent_of, percents
from stepscope_report.html import Colours, Html, illustrated, section, stacked, table, tag
from stepscope_report.html.timecharts import gantt
from stepscope_report.sections import OVERVIEW, Section
from stepscope_report.sections.critical_path import path_marks
from stepscope_report.spans import TRANSFER, is_transfer, label_of
from stepscope_report.table import Block, TextTable
from stepscope_report.timeline import Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page

_SHOWN_GAPS = 3
"""Number of gaps that are shown, the largest first."""
_LEAST = 100
"""Gaps are shown if unaccounted time is at least 1 / `_LEAST` of the step."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """All stretches without a span that lie between the same two stages, added up."""

    before: Label | None
    """(role, stage) of the span that ended before the gap; None if the gap begins with the step."""
    after: Label | None
    """(role, stage) of the span that began after the gap; None if the gap lasts to the end of the step."""
    wall_ns: int
    count: int


class Stretch(NamedTuple):
    """A part of a time window in which no interval runs."""

    start_ns: int
    end_ns: int
    before: int | None
    """Index of the interval that ended when the stretch began; None if the window began then. `after` is the
    index of the interval that began when the stretch ended; None if the window ended then."""
    after: int | None

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


def find_stretches(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> Iterator[Stretch]:
    """Yield each stretch of the window in which no interval runs, in order."""
    at_ns, before = start_ns, None
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index].start_ns):
        opens_ns, closes_ns = max(intervals[index].start_ns, start_ns), min(intervals[index].end_ns, end_ns)
        if opens_ns >= closes_ns:
            continue
        if opens_ns > at_ns:
            yield Stretch(at_ns, opens_ns, before, index)
        if closes_ns > at_ns:
            at_ns, before = closes_ns, index
    if end_ns > at_ns:
        yield Stretch(at_ns, end_ns, before, None)


def _sum_up(gaps: Iterable[tuple[Label | None, Label | None, int]]) -> tuple[Gap, ...]:
    """Add up the gaps (before, after, ns) between the same two stages. The longest sum comes first."""
    wall_ns, numbers = Counter[tuple[Label | None, Label | None]](), Counter[object]()
    for before, after, ns in gaps:
        wall_ns[before, after] += ns
        numbers[before, after] += 1
    return tuple(
        Gap(before=before, after=after, wall_ns=ns, count=numbers[before, after])
        for (before, after), ns in wall_ns.most_common()
    )


def name_gap(gap: Gap) -> str:
    """Return the position of the gap as text: `between actor update_actor and rollout load_weights`."""
    before, after = (None if label is None else " ".join(label) for label in (gap.before, gap.after))
    if before is None and after is None:
        return "from the step's begin to its end"
    if before is None:
        return f"before the first span, {after}"
    return f"after the last span, {before}" if after is None else f"between {before} and {after}"


LineKind: TypeAlias = Literal["stage", "profiler", "unaccounted"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the breakdown: a stage, the profiler, or unaccounted time."""

    kind: LineKind
    """Kind of the line. Only a line of the kind `stage` has `role` and `stage`. `profiler`: time in which an
    engine served nothing because its own profiler started or wrote, and time in which the profilers of single
    stages were started or stopped. `unaccounted`: time in which no span ran."""
    role: str | None = None
    stage: str | None = None
    wall_ns: int
    """The line's share of the step, in ns. Time in which several stages ran is split equally among these
    stages."""
    alone_ns: int
    """Part of `wall_ns` in which no other stage ran."""
    active_ns: int
    """Time in which the stage ran, whether alone or not. The time by which `active_ns` exceeds `wall_ns` was
    attributed to other stages."""
    waits: bool = False
    """True if the stage only waits. Its time counts only where no other stage works."""
    outside_engine: bool = False
    """True if the stage is the call of an engine whose request phases are recorded below the call. The
    stage's own time is then transport and event loop."""


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Stages that ran at the same time. `wall_ns` is the time for which exactly these stages ran; each stage
    gets an equal part of this time.
    """

    stages: tuple[Label, ...]
    wall_ns: int


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one step: its time by role and stage."""

    window_ns: int
    """Duration of the step alone, from the end of the capture's opening to the start of its closing. The
    lines add up to this time, which is 100 %."""
    opening_ns: int
    """Time that the owner (the slowest owner, if there are several) took to open the capture, before the
    step."""
    closing_ns: int
    """Time that the owner (the slowest owner, if there are several) took to close the capture, after the
    step."""
    total_ns: int
    """Sum of opening, step and closing: the time that the code around the capture measured."""
    lines: tuple[Line, ...]
    """Stages by share, the largest first; then the profiler, if it took time within the step; then the
    unaccounted time."""
    overlaps: tuple[Overlap, ...]
    """Stages that ran at the same time, the longest overlap first."""
    gaps: tuple[Gap, ...]
    """Parts of the unaccounted time, the longest first. They add up to all unaccounted time."""
    stalled_ns: int = 0
    """Part of the step in which an engine's requests waited for the engine's own profiler."""
    stalled_most_ns: int = 0
    """Upper bound of `stalled_ns`. Requests whose spans name no replica are counted as if each request had
    waited for a replica whose profiler was writing."""
    left_out: tuple[str, ...]
    """Names of processes with an unaligned clock. No line contains their spans, because the place of these
    spans in the step is unknown."""


def step_breakdown(timeline: Timeline) -> Breakdown:
    """Return the account of the step on the owner's clock, by role and stage."""
    window = timeline.window
    work = work_of(timeline, range(len(timeline.spans)))
    shares = divide_work(timeline, work, window.start_ns, window.end_ns)
    gaps = _name_transfers(find_stretches(work.intervals, window.start_ns, window.end_ns), work, shares)
    stalled_ns = shares.wall_ns.pop(STALLED, 0)
    profiler_ns = stalled_ns + shares.wall_ns.pop(WINDOWS, 0)
    for label in (STALLED, WINDOWS):
        shares.active_ns.pop(label, None)
    opening_ns, closing_ns = beside_step(timeline)
    labels = sorted(
        shares.active_ns, key=lambda label: (-shares.wall_ns[label], -shares.active_ns[label], label)
    )
    works = {label_of(span) for span in timeline.spans if not span.waits}
    waits = {label_of(span) for span in timeline.spans if span.waits} - works
    above = (
        timeline.spans[span.parent]
        for span in timeline.spans
        if span.stage in SERVED and span.parent is not None
    )
    calls = {label_of(span) for span in above if span.stage.startswith("generate")}
    stages = [_stage(label, shares, label in waits, label in calls) for label in labels]
    return Breakdown(
        total_ns=opening_ns + window.wall_ns + closing_ns,
        stalled_ns=stalled_ns,
        stalled_most_ns=stalled_most_ns(timeline, work) if timeline.stalls else 0,
        window_ns=window.wall_ns,
        opening_ns=opening_ns,
        closing_ns=closing_ns,
        lines=(
            *stages,
            *([_other("profiler", profiler_ns)] if profiler_ns else ()),
            _other("unaccounted", shares.idle_ns),
        ),
        overlaps=tuple(Overlap(stages=stages, wall_ns=ns) for stages, ns in shares.together_ns.most_common()),
        gaps=gaps,
        left_out=tuple(process.name for process in timeline.processes if not process.aligned),
    )


def _name_transfers(stretches: Iterable[Stretch], work: Work, shares: Shares) -> tuple[Gap, ...]:
    """In `shares`, add each stretch between the trainer's and the engine's part of a weight sync to the stage
    `TRANSFER`. Return the other stretches as gaps: they remain unaccounted.
    """

    def label_of(index: int | None) -> Label | None:
        return None if index is None else work.labels[work.intervals[index].bit]

    unnamed = []
    for stretch in stretches:
        before, after = label_of(stretch.before), label_of(stretch.after)
        if after is not None and is_transfer(before, after):
            shares.idle_ns -= stretch.wall_ns
            for counter in (shares.wall_ns, shares.alone_ns, shares.active_ns):
                counter[after[0], TRANSFER] += stretch.wall_ns
        else:
            unnamed.append((before, after, stretch.wall_ns))
    return _sum_up(unnamed)


def _stage(label: Label, shares: Shares, waits: bool, outside_engine: bool) -> Line:
    return Line(
        kind="stage",
        role=label[0],
        stage=label[1],
        wall_ns=shares.wall_ns[label],
        alone_ns=shares.alone_ns[label],
        active_ns=shares.active_ns[label],
        waits=waits,
        outside_engine=outside_engine,
    )


def _other(kind: LineKind, ns: int) -> Line:
    return Line(kind=kind, wall_ns=ns, alone_ns=ns, active_ns=ns)


BETWEEN = "+ between steps"
"""Name of the line below the table for the time between the end of a step and the start of the next."""
BESIDE = "+ opening, closing"
"""Name of the line below the table for the time that the capture took before and after the step."""


def breakdown_blocks(breakdown: Breakdown, report: StepReport) -> Iterator[Block]:
    """Yield the account, its gaps, and the stages that ran at the same time, as blocks for the terminal."""
    yield account_table(breakdown, between_ns(report))
    if gaps := gap_table(breakdown):
        yield gaps
    if breakdown.overlaps:
        yield overlap_table(breakdown, LISTED // 2)


def between_ns(report: StepReport) -> int | None:
    """Return the median time between two steps, in ns. None if the time is unknown or below 1 % of a step."""
    baseline = report.baseline
    if baseline is None or baseline.between_ns is None or baseline.between_ns * 100 < baseline.p50_ns:
        return None
    return baseline.between_ns


def account_table(breakdown: Breakdown, between_ns: int | None = None) -> TextTable:
    """Return the table of the shares of all stages, which add up to the step.

    Args:
        between_ns: Time between two steps, shown in a line below the step.
    """
    whole_ns = breakdown.window_ns
    rows = [_account_row(line) for line in _shown_lines(breakdown)]
    rows.append(("", "step", duration(whole_ns), percent_of(whole_ns, whole_ns), "", ""))
    if between_ns is not None:
        rows.append(("", BETWEEN, duration(between_ns), "", "", ""))
    note = "alone: not shared with other stages. active: all time in which it ran, attributed to it or not."
    note += _say_calls(breakdown)
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    if beside_ns:
        rows.append(("", BESIDE, duration(beside_ns), "", "", ""))
        note += f"\n{say_outside(breakdown)}"
    if breakdown.left_out:
        note += f"\n{say_left_out(breakdown)}"
    columns = ("role", "stage", ">wall", ">%", ">alone", ">active")
    return TextTable("Where it went", columns, tuple(rows), note)


class _Shown(NamedTuple):
    """One line of the account's table."""

    line: Line | None
    """The line of the breakdown, or None for all smaller stages together."""
    name: str
    wall_ns: int
    share: str


def _shown_lines(breakdown: Breakdown) -> Iterator[_Shown]:
    """Yield the lines of the account. After the other stages, all `smaller_stages` share one line."""
    shares = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)
    small = smaller_stages(breakdown)
    for line, share in zip(breakdown.lines, shares, strict=True):
        if line in small:
            continue
        if line.kind != "stage" and small:
            wall_ns = sum(folded.wall_ns for folded in small)
            share_of_all = percent_of(wall_ns, breakdown.window_ns)
            yield _Shown(None, f"{len(small)} smaller stages", wall_ns, share_of_all)
            small = []
        name = (line.stage or "") + remark(line) if line.kind == "stage" else line.kind
        yield _Shown(line, name, line.wall_ns, share)


def _account_row(shown: _Shown) -> tuple[str, ...]:
    line, wall = shown.line, duration(shown.wall_ns)
    if line is None or line.kind != "stage":
        return "", shown.name, wall, shown.share, "", ""
    return line.role or "", shown.name, wall, shown.share, duration(line.alone_ns), duration(line.active_ns)


def gap_table(breakdown: Breakdown) -> TextTable | None:
    """Return the table of the largest gaps, with all smaller gaps summed in one row. None if unaccounted time
    is below 1 % of the step.
    """
    unaccounted_ns = sum(gap.wall_ns for gap in breakdown.gaps)
    if unaccounted_ns * _LEAST < max(breakdown.window_ns, 1):
        return None
    largest, rest = breakdown.gaps[:_SHOWN_GAPS], breakdown.gaps[_SHOWN_GAPS:]
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
    """Return the table of stages that ran at the same time, with a row for each of the longest `most`
    combinations.
    """
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
    """Return the step's cells in the overview of a run. Three durations come first: the step, the median
    uncaptured step, and opening plus closing. Then comes the unaccounted share. The last cell is `yes` for a
    complete step, else `no`; `, ended early` is added if an exception ended the step.
    """
    breakdown, health = report.breakdown, report.health
    usual_ns = None if report.baseline is None else report.baseline.p50_ns
    times = (breakdown.window_ns, usual_ns, breakdown.opening_ns + breakdown.closing_ns)
    unaccounted = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)[-1]
    early = "" if health.user_error is None else ", ended early"
    return *map(duration, times), f"{unaccounted} %", f"{'yes' if health.complete else 'no'}{early}"


def say_outside(breakdown: Breakdown) -> str:
    """Return a sentence on the time that opening and closing the capture took."""
    return (
        f"The capture took {duration(breakdown.opening_ns)} to open before the step and "
        f"{duration(breakdown.closing_ns)} to close after it; other steps do not pay that."
    )


def remark(line: Line) -> str:
    """Return the remark behind a stage's name: ` (waiting)`, ` (outside the engine)`, or an empty text."""
    return " (waiting)" if line.waits else " (outside the engine)" if line.outside_engine else ""


def _say_calls(breakdown: Breakdown) -> str:
    small = smaller_stages(breakdown)
    shown = any(line.outside_engine and line not in small for line in breakdown.lines)
    return "\noutside the engine: transport of requests, and the event loop." if shown else ""


def say_left_out(breakdown: Breakdown) -> str:
    """Return a sentence that names the processes in `Breakdown.left_out`, up to `LISTED` of them."""
    names = breakdown.left_out
    more = "" if len(names) <= LISTED else f" and {len(names) - LISTED:,} more"
    return f"Not in here, because their clocks are unaligned: {', '.join(names[:LISTED])}{more}"


LINES = 24
"""Largest number of stages with a bar of their own. All further stages share one bar."""
SMALL = 1000
"""Stages below 1 / `SMALL` of the step share one bar."""


def smaller_stages(breakdown: Breakdown) -> list[Line]:
    """Return the stages that share one bar: stages below 1 / `SMALL` of the step, and all stages after the
    first `LINES`. Empty for a single such stage, which gets a bar of its own.
    """
    stages = [line for line in breakdown.lines if line.kind == "stage"]
    small = [
        line for at, line in enumerate(stages) if at >= LINES or line.wall_ns * SMALL < breakdown.window_ns
    ]
    return small if len(small) > 1 else []


def draw_breakdown(breakdown: Breakdown, page: Page) -> Iterator[Html]:
    """Yield the account with bars, its gaps, and the stages that ran at the same time."""
    account, lines = account_table(breakdown, between_ns(page.report)), list(_shown_lines(breakdown))
    longest_ns = max((shown.wall_ns for shown in lines), default=0)
    bars = [_bar(shown, longest_ns, page.colours) for shown in lines]
    drawn = illustrated(account, 2, "", bars, "account-table")
    further = (*_gaps(breakdown), *_overlaps(breakdown))
    yield section("account", "Where it went", drawn, *further, note=account.note)


def draw_when(page: Page) -> Html:
    """Return the chart of the calls of each process over time."""
    chart = draw_gantt(page.timeline, page.report.stages)
    path = blend_short(path_marks(page.report.critical_path), chart.shortest_ns)
    return gantt(chart, page.colours, path)


def _bar(shown: _Shown, longest_ns: int, colours: Colours) -> Html:
    line, role = shown.line, ""
    kind: str = "co" if line is None else line.kind
    if line is not None and line.kind == "stage":
        role, kind = f"{line.role} ", colours.of((line.role or "", line.stage or ""))
    hover = f"{role}{shown.name} {duration(shown.wall_ns)}, {shown.share} %"
    return stacked([(kind, shown.wall_ns, hover)], longest_ns)


def _gaps(breakdown: Breakdown) -> Iterator[Html]:
    gaps = gap_table(breakdown)
    if gaps is not None:
        ns, number = sum(gap.wall_ns for gap in breakdown.gaps), sum(gap.count for gap in breakdown.gaps)
        title = f"Unaccounted: {duration(ns)} in {count(number, 'gap')}"
        yield tag("details", tag("summary", title), table(gaps.columns, gaps.rows))


def _overlaps(breakdown: Breakdown) -> Iterator[Html]:
    if breakdown.overlaps:
        overlaps = overlap_table(breakdown, LINES - 1)
        title = f"At the same time, split equally above: {count(len(breakdown.overlaps), 'combination')}"
        yield tag("details", tag("summary", title), table(overlaps.columns, overlaps.rows))


BREAKDOWN: Section[Breakdown] = Section(
    name="breakdown",
    title="Where it went",
    compute=lambda sources: step_breakdown(sources.timeline),
    terminal=breakdown_blocks,
    html=draw_breakdown,
    page=OVERVIEW,
)
