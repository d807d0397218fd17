"""A step's report as tables for a terminal: 100 columns are enough, and nothing is said by colour alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.report.accounting import Label
from stepscope.report.formatting import duration, middle, moment, percents, plain, turn
from stepscope.report.step import StepReport
from stepscope.report.tables.breakdown import Breakdown
from stepscope.report.tables.long_tail import Extreme, LongTail, SlowTrajectory
from stepscope.report.tables.stages import Stage
from stepscope.report.terminal.baseline import say_beside, say_usual
from stepscope.report.terminal.diff import BESIDE
from stepscope.report.terminal.engine import engines
from stepscope.report.terminal.health import say_again, say_ended, say_incomplete, trust
from stepscope.report.terminal.layout import LISTED, table
from stepscope.report.terminal.memory import cuda_memory
from stepscope.report.terminal.sections import (
    GAP_COLUMNS,
    advise,
    gap_rows,
    idle,
    name_slow,
    say_bubble,
    say_held,
    say_left_out,
    say_others,
    say_outside,
    say_profiled,
    say_slowed,
    staleness,
    starred,
    traces,
    waiting,
)

SIDE_BY_SIDE = 8
"""Processes that have a column each; more are summed up."""


def render(report: StepReport) -> Group:
    """All tables of one step."""
    return Group(*_sections(report))


def render_short(report: StepReport) -> Group:
    """Show how long one step took, what to do first, and where its time went."""
    first = [advise(report.advice[:1], report.breakdown.window_ns)] if report.advice else []
    return Group(_head(report), *first, _breakdown(report.breakdown))


def render_overview(reports: Sequence[StepReport]) -> RenderableType:
    """One line for each of several steps."""
    runs = len({report.run_id for report in reports}) > 1
    columns = (
        ">step", *(["run"] * runs), ">took", ">uncaptured", f">{BESIDE}", ">unaccounted", "largest stages",
        "complete",
    )  # fmt: skip
    note = "%: of the step (took). uncaptured: the median of steps near it that were not captured.\n"
    note += f"{BESIDE}: the capture, outside of the step."
    return table("Steps", columns, [_overview(report, runs) for report in reports], note)


def _overview(report: StepReport, runs: bool) -> list[str]:
    breakdown, lines = report.breakdown, report.breakdown.lines
    shares = list(zip(lines, percents([line.wall_ns for line in lines], breakdown.window_ns), strict=True))
    other = {line.kind: f"{share} %" for line, share in shares if line.kind != "stage"}
    most = ", ".join(f"{line.stage} {share} %" for line, share in shares[:2] if line.kind == "stage")
    complete = "yes" if report.health.complete else "no"
    complete += "" if report.health.user_error is None else ", ended early"
    run = [report.run_id] * runs
    usual_ns = None if report.baseline is None else report.baseline.p50_ns
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    took = duration(breakdown.window_ns), duration(usual_ns), duration(beside_ns)
    return [str(report.step), *run, *took, other["unaccounted"], most, complete]


def _sections(report: StepReport) -> Iterator[RenderableType]:
    yield _head(report)
    if report.advice:
        yield advise(report.advice, report.breakdown.window_ns)
    yield _breakdown(report.breakdown)
    yield from _gaps(report.breakdown)
    if report.breakdown.overlaps:
        yield _overlaps(report.breakdown)
    if report.stages:
        yield _stages(report.stages)
    yield from _by_process(report.stages)
    yield from idle(report.idle, report.breakdown.window_ns)
    if report.long_tail is not None:
        yield from _long_tail(report.long_tail)
    if report.staleness is not None:
        yield from staleness(report.staleness)
    yield from engines(report.engines, report.phaseless)
    if report.traces is not None:
        yield from traces(report.traces)
    yield from cuda_memory(report.cuda_memory)
    yield from trust(report.health)


def _head(report: StepReport) -> Text:
    total_ns, window_ns = report.breakdown.total_ns, report.breakdown.window_ns
    took = f"{duration(window_ns)} ({duration(total_ns)} with opening and closing the capture)"
    said = f"Step {report.step} of run {plain(report.run_id)}, {moment(report.opened_ns)}: {took}"
    usual = (say_usual(report.baseline), say_beside(report.baseline))
    health = report.health
    for remark in filter(None, (say_ended(health), plain(say_incomplete(health)), say_again(health), *usual)):
        said += f"\n{remark}"
    others = [plain(run) for run in report.runs if run != report.run_id]
    if others:
        said += f"\nOther runs wrote into this folder, see --run: {', '.join(others)}"
    return Text(said, style="bold")


def _breakdown(breakdown: Breakdown) -> RenderableType:
    shares = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)
    rows: list[Sequence[str]] = []
    for line, share in zip(breakdown.lines, shares, strict=True):
        wall = duration(line.wall_ns)
        if line.kind == "stage":
            rows.append(
                (
                    line.role or "",
                    (line.stage or "") + waiting(line),
                    wall,
                    share,
                    duration(line.alone_ns),
                    duration(line.active_ns),
                )
            )
        else:
            rows.append(("", line.kind, wall, share, "", ""))
    (whole,) = percents([breakdown.window_ns], breakdown.window_ns)
    rows.append(("", "step", duration(breakdown.window_ns), whole, "", ""))
    note = "alone: not shared with other stages. active: how long it went on at all, billed to it or not."
    beside_ns = breakdown.opening_ns + breakdown.closing_ns
    if beside_ns:
        rows.append(("", BESIDE, duration(beside_ns), "", "", ""))
        note += f"\n{say_outside(breakdown)}"
    if breakdown.left_out:
        note += f"\n{plain(say_left_out(breakdown))}"
    return table("Where it went", ("role", "stage", ">wall", ">%", ">alone", ">active"), rows, note)


def _gaps(breakdown: Breakdown) -> Iterator[RenderableType]:
    rows = gap_rows(breakdown)
    if rows:
        yield table("Unaccounted: the largest gaps", GAP_COLUMNS, rows)


def _overlaps(breakdown: Breakdown) -> RenderableType:
    longest = breakdown.overlaps[: LISTED // 2]
    shares = percents([overlap.wall_ns for overlap in longest], breakdown.window_ns)
    rows = [
        (duration(overlap.wall_ns), share, " + ".join(map(_label, overlap.stages)))
        for overlap, share in zip(longest, shares, strict=True)
    ]
    rest = breakdown.overlaps[len(longest) :]
    if rest:
        rows.append(
            (duration(sum(overlap.wall_ns for overlap in rest)), "", f"{len(rest)} other combinations")
        )
    return table("At the same time (split equally above)", (">wall", ">%", "stages"), rows)


def _stages(stages: Sequence[Stage]) -> RenderableType:
    extra = [name for name in ("open", "errors") if any(getattr(stage, name) for stage in stages)]
    rows = [
        (
            stage.role, stage.stage, f"{stage.calls:,}", *(str(getattr(stage, name) or "") for name in extra),
            duration(stage.total_ns), duration(stage.mean_ns), duration(stage.p50_ns), duration(stage.max_ns),
        )
        for stage in stages
    ]  # fmt: skip
    columns = ("role", "stage", ">calls", *(f">{name}" for name in extra), ">total", ">mean", ">p50", ">max")
    return table(
        "Calls", columns, rows, "The total is a sum over calls: of concurrent ones it exceeds the step."
    )


def _by_process(stages: Sequence[Stage]) -> Iterator[RenderableType]:
    """For each role that several processes have: when each was busy, side by side."""
    roles: dict[str, list[Stage]] = defaultdict(list)
    for stage in stages:
        if len(stage.processes) > 1:
            roles[stage.role].append(stage)
    for role, mine in roles.items():
        names = dict.fromkeys(share.process for stage in mine for share in stage.processes)
        title = f"Busy time by process: {plain(role)}"
        profiled = {share.process for stage in mine for share in stage.processes if share.profiled}
        note = say_profiled(bool(profiled))
        if len(names) <= SIDE_BY_SIDE:
            heads = (f">{starred(name, name in profiled)}" for name in names)
            yield table(title, ("stage", *heads, ">max/median"), [_each(s, names) for s in mine], note)
        else:
            yield table(
                title,
                ("stage", ">processes", ">min", ">median", ">max", ">max/median", "slowest"),
                map(_summed, mine),
                note,
            )


def _each(stage: Stage, names: dict[str, None]) -> list[str]:
    busy = {share.process: share.busy_ns for share in stage.processes}
    return [stage.stage, *(duration(busy.get(name)) for name in names), _ratio(stage.imbalance)]


def _summed(stage: Stage) -> list[str]:
    busy = sorted(share.busy_ns for share in stage.processes)
    spread = (busy[0], middle(busy), busy[-1])
    return [stage.stage, str(len(busy)), *map(duration, spread), _ratio(stage.imbalance), _slowest(stage)]


def _slowest(stage: Stage) -> str:
    profiled = any(share.profiled for share in stage.processes if share.process == stage.slowest)
    return starred(stage.slowest or "", profiled)


def _long_tail(tail: LongTail) -> Iterator[RenderableType]:
    rows = [
        (
            spread.role, spread.stage, f"{spread.calls:,}", duration(spread.p50_ns), duration(spread.p90_ns),
            duration(spread.p99.ns), duration(spread.max.ns), _whose(spread.p99), _whose(spread.max),
        )
        for spread in tail.spreads
    ]  # fmt: skip
    columns = ("role", "stage", ">calls", ">p50", ">p90", ">p99", ">max", "p99 is", "max is")
    yield table(
        "Long tail",
        columns,
        rows,
        "\n".join(filter(None, (say_held(tail), say_bubble(tail), say_others(tail), say_slowed(tail)))),
    )
    if tail.worst:
        yield table(
            "Slowest trajectories", ("trajectory", ">took", ">began at", "of that"), map(_slow, tail.worst)
        )


def _slow(slow: SlowTrajectory) -> tuple[str, str, str, str]:
    took = duration(slow.wall_ns) + (" (open)" if slow.open else "")
    waits = ", ".join(f"{wait.stage} {duration(wait.wall_ns)}" for wait in slow.waits[:4])
    return name_slow(slow), took, duration(slow.start_ns), waits


def _whose(extreme: Extreme) -> str:
    return turn(extreme.trajectory, extreme.turn)


def _label(label: Label) -> str:
    return " ".join(label)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
