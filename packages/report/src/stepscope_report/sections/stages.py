"""*Calls*: durations of each stage's calls, and their balance over the processes that ran the stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.spans import PROFILING
from stepscope_report.accounting import Pair, outside, rank_of, union_ns
from stepscope_report.charts import pick
from stepscope_report.formatting import count, duration, middle, say_profiled, starred
from stepscope_report.html import Html, draw, illustrated, section, tag
from stepscope_report.sections import PROCESSES, Section
from stepscope_report.spans import ReplicaKey, ToolNames, above, replica_of, title
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Span, Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one stage in one process."""

    process: str
    rank: int | None
    calls: int
    busy_ns: int
    """Time in which at least one call ran. Time with several calls at once counts once."""
    total_ns: int
    """Sum of the durations of all calls. Exceeds `busy_ns` if calls ran at the same time."""
    stalled_ns: int = 0
    """Part of `busy_ns` in which the engine served nothing because its own profiler started or wrote."""
    waited_ns: int = 0
    """Part of `busy_ns` in which calls only waited inside, for example in a collective or a queue."""
    profiled: bool = False
    """True if a profiler recorded the process and thereby slowed it."""
    cut: bool = False
    """True if the process never closed its capture and a call has no end: the times are lower bounds."""

    @property
    def at_work_ns(self) -> int:
        """Return `busy_ns` without waits, in ns. Stalls of the engine are included."""
        return self.busy_ns - self.waited_ns

    @property
    def worked_ns(self) -> int:
        return max(0, self.busy_ns - self.stalled_ns - self.waited_ns)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one stage in one role. Times of calls are None if no call has ended.

    A call inside another call of the same stage, in the same thread and trajectory, counts as a part of that
    call.
    """

    role: str
    stage: str
    calls: int
    """Number of calls that ended."""
    open: int
    """Number of calls without a recorded end. Their time until the last sign of life counts in `processes`
    only."""
    errors: int
    cancelled: int = 0
    """Number of cancelled calls. `calls` includes cancelled calls, and `errors` does not."""
    total_ns: int
    mean_ns: int | None
    p50_ns: int | None
    max_ns: int | None
    processes: tuple[Share, ...]
    imbalance: float | None
    """Ratio of the largest to the median time at work of the compared processes. For a stage that only waits,
    the ratio is of the times waiting. None for a single process, or if the median is 0."""
    slowest: str | None
    """Name of the compared process with the most time at work. None for a single process."""
    waits: bool = False
    """True if all calls of the stage wait and do no work."""
    name: str | None = None
    """Name of the tool (the span's attribute `name`), or None for stages that are no tools."""

    @property
    def title(self) -> str:
        """Stage with the tool's name, such as `tool search`, or the stage alone."""
        return title(self.stage, self.name)

    @property
    def compared(self) -> list[Share]:
        """Return the processes without those whose calls are cut off. The process with the most time at work
        is always included, because that process is slow in any case.
        """
        return _compared(self.processes)

    @property
    def waited(self) -> bool:
        """Return True if, in some process, calls spent at least 1 % of their time waiting."""
        return any(share.waited_ns * 100 >= share.busy_ns > 0 for share in self.processes)

    @property
    def uneven(self) -> bool:
        """Return True if a profiler recorded some but not all of the processes."""
        return len({share.profiled for share in self.processes}) > 1


def stage_times(timeline: Timeline) -> Table[Stage]:
    """Return the stages of all roles, by total time, the longest first. Tools with different names count as
    different stages.
    """
    names = ToolNames(timeline)
    counted = (
        span for span in timeline.spans if span.stage != PROFILING and not _is_part(timeline, span, names)
    )
    spans, waits = grouped(counted, names.label_of), waits_below(timeline)
    stages = [_stage(timeline, (label[0], *names.parts(label)), own, waits) for label, own in spans.items()]
    return Table(sorted(stages, key=lambda stage: (-stage.total_ns, stage.role, stage.title)))


def waits_below(timeline: Timeline) -> Mapping[int, Sequence[Pair]]:
    """Return {`id()` of a span: times at which calls inside the span waited and none worked}.

    Only innermost calls of the span's own thread count, because the time between them is the span's own work.
    """
    leaves = set(range(len(timeline.spans))) - {span.parent for span in timeline.spans}
    waits: dict[int, list[Pair]] = defaultdict(list)
    works: dict[int, list[Pair]] = defaultdict(list)
    for is_work in (False, True):
        for index in leaves:
            leaf = timeline.spans[index]
            if leaf.waits is is_work:
                continue
            for outer in above(timeline, leaf):
                if (outer.process, outer.thread) != (leaf.process, leaf.thread) or outer.waits:
                    break
                if not is_work:
                    waits[id(outer)].append((leaf.start_ns, timeline.until_ns(leaf)))
                elif id(outer) in waits:
                    works[id(outer)].append((leaf.start_ns, timeline.until_ns(leaf)))
    return {span: outside(pairs, works[span]) for span, pairs in waits.items()}


def _is_part(timeline: Timeline, span: Span, names: ToolNames) -> bool:
    """Return True if a span lies inside another call of the same stage, as in recursion."""
    place = _place(span)
    return any(
        _place(outer) == place and names.label_of(outer) == names.label_of(span)
        for outer in above(timeline, span)
    )


def _place(span: Span) -> tuple[object, ...]:
    return span.process, span.thread, span.role, span.stage, span.trajectory, span.turn


def _stage(
    timeline: Timeline,
    label: tuple[str, str, str | None],
    spans: Sequence[Span],
    waits: Mapping[int, Sequence[Pair]],
) -> Stage:
    times = sorted(span.dur_ns for span in spans if span.dur_ns is not None)
    shares = _shares(timeline, spans, waits)
    compared = _compared(shares)
    busiest = max(compared, key=lambda share: share.at_work_ns)
    median = middle(share.at_work_ns for share in compared)
    several = len(compared) > 1
    return Stage(
        role=label[0],
        stage=label[1],
        name=label[2],
        calls=len(times),
        open=len(spans) - len(times),
        errors=sum(span.error is not None for span in spans),
        cancelled=sum(span.cancelled for span in spans),
        total_ns=sum(times),
        mean_ns=sum(times) // len(times) if times else None,
        p50_ns=times[rank_of(50, len(times))] if times else None,
        max_ns=times[-1] if times else None,
        processes=shares,
        imbalance=round(busiest.at_work_ns / median, 3) if several and median else None,
        slowest=busiest.process if several else None,
        waits=all(span.waits for span in spans),
    )


def _compared(shares: Sequence[Share]) -> list[Share]:
    most_ns = max(share.at_work_ns for share in shares)
    return [share for share in shares if not share.cut or share.at_work_ns == most_ns]


def _shares(
    timeline: Timeline, spans: Iterable[Span], waits: Mapping[int, Sequence[Pair]]
) -> tuple[Share, ...]:
    """Return the share of each process that ran one of these calls, in the timeline's order."""
    by_process = sorted(grouped(spans, lambda span: span.process).items())
    return tuple(_share(timeline, index, own, waits) for index, own in by_process)


def _share(
    timeline: Timeline, index: int, spans: Sequence[Span], waits: Mapping[int, Sequence[Pair]]
) -> Share:
    process = timeline.processes[index]
    busy_ns = union_ns(_running(timeline, spans))
    waited_ns = 0
    if any(id(span) in waits for span in spans):
        working = (
            pair
            for span in spans
            for pair in outside([(span.start_ns, timeline.until_ns(span))], waits.get(id(span), ()))
        )
        waited_ns = busy_ns - union_ns(working)
    return Share(
        process=process.name,
        rank=process.info.rank,
        calls=sum(span.dur_ns is not None for span in spans),
        busy_ns=busy_ns,
        total_ns=sum(end_ns - start_ns for start_ns, end_ns in _running(timeline, spans)),
        stalled_ns=busy_ns - _served_ns(timeline, spans) if timeline.stalls else 0,
        waited_ns=waited_ns,
        profiled=process.profiled,
        cut=process.closed_ns is None and any(span.end_ns is None for span in spans),
    )


def _served_ns(timeline: Timeline, spans: Sequence[Span]) -> int:
    """Return the time in which at least one of the calls ran and its engine was not stalled by its own
    profiler.
    """
    served: list[Pair] = []
    for replica, own in grouped(spans, lambda span: replica_of(timeline, span)).items():
        stalls = [
            (stall.start_ns, stall.end_ns)
            for stall in timeline.stalls
            if ReplicaKey(stall.replica) == replica and spans[0].role == "rollout"
        ]
        served += outside(_running(timeline, own), stalls)
    return union_ns(served)


def _running(timeline: Timeline, spans: Iterable[Span]) -> list[Pair]:
    return [(span.start_ns, timeline.until_ns(span)) for span in spans]


SIDE_BY_SIDE = 8
"""Largest number of processes with a column each. If there are more, a summary is shown."""
WAITS_NOTE = "Work + waiting in calls inside, such as collectives. max/median compares only work."
CALLS_NOTE = (
    "A call includes the calls inside it. The total is a sum: with concurrent calls it exceeds the step."
)


def stage_blocks(stages: Sequence[Stage], report: StepReport) -> Iterator[Block]:
    """Yield a table of the calls of each stage, and a table of busy times for each role with several
    processes.
    """
    if stages:
        yield _calls(stages)
    for role, group in roles_of_several(stages).items():
        yield _busy_table(role, group)


def _calls(stages: Sequence[Stage]) -> TextTable:
    """Return the table of calls. `open`, `errors` and `cancelled` have columns only if some stage has such
    calls.
    """
    states = ("open", "errors", "cancelled")
    extra = [name for name in states if any(getattr(stage, name) for stage in stages)]
    columns = ("role", "stage", ">calls", *(f">{name}" for name in extra), ">total", ">mean", ">p50", ">max")
    rows = tuple(
        (
            stage.role,
            stage.title,
            f"{stage.calls:,}",
            *(str(getattr(stage, name) or "") for name in extra),
            *map(duration, (stage.total_ns, stage.mean_ns, stage.p50_ns, stage.max_ns)),
        )
        for stage in stages
    )
    return TextTable("Calls", columns, rows, CALLS_NOTE)


def roles_of_several(stages: Sequence[Stage]) -> Mapping[str, Sequence[Stage]]:
    """Return {role: its stages that ran in several processes}, for roles that have such stages."""
    return grouped((stage for stage in stages if len(stage.processes) > 1), lambda stage: stage.role)


def _busy_table(role: str, stages: Sequence[Stage]) -> TextTable:
    names = dict.fromkeys(share.process for stage in stages for share in stage.processes)
    profiled = {share.process for stage in stages for share in stage.processes if share.profiled}
    title, note = f"Busy time by process: {role}", say_profiled(bool(profiled))
    if any(stage.waited for stage in stages):
        note = f"{WAITS_NOTE} {note}".rstrip()
    if len(names) > SIDE_BY_SIDE:
        return _summary(title, stages, note)
    heads = (f">{starred(name, name in profiled)}" for name in names)
    rows = tuple(_side_by_side(stage, names) for stage in stages)
    return TextTable(title, ("stage", *heads, ">max/median"), rows, note)


def _summary(title: str, stages: Sequence[Stage], note: str = "") -> TextTable:
    columns = ("stage", ">processes", ">min", ">median", ">max", ">max/median", "slowest")
    return TextTable(title, columns, tuple(map(_summed, stages)), note)


def _side_by_side(stage: Stage, names: Mapping[str, None]) -> tuple[str, ...]:
    parts = {share.process: _parts(stage, share) for share in stage.processes}
    return stage.title, *(parts.get(name, duration(None)) for name in names), ratio(stage.imbalance)


def _parts(stage: Stage, share: Share) -> str:
    """Return the time at work as text, followed by the time of waits inside if `Stage.waited`."""
    least = "at least " if share.cut else ""
    if not stage.waited:
        return f"{least}{duration(share.busy_ns)}"
    return f"{least}{duration(share.at_work_ns)} + {duration(share.waited_ns)}"


def _summed(stage: Stage) -> tuple[str, ...]:
    work = sorted(share.at_work_ns for share in stage.compared)
    spread = (work[0], middle(work), work[-1])
    return (
        stage.title,
        str(len(stage.processes)),
        *map(duration, spread),
        ratio(stage.imbalance),
        slowest(stage),
    )


def slowest(stage: Stage) -> str:
    """Return the name of the process with the most work, with a `*` if a profiler recorded that process.
    Empty for a single process.
    """
    profiled = any(share.profiled for share in stage.processes if share.process == stage.slowest)
    return starred(stage.slowest or "", profiled)


def ratio(value: float | None) -> str:
    """Return a ratio as text: `1.23`, or `-` for None."""
    return "-" if value is None else f"{value:.2f}"


NUMBERED = 8
"""Largest number of processes for which each cell shows its time as text."""
CELLS = 512
"""Largest number of cells in a row. If there are more processes, every k-th and the slowest process have a
cell."""
_STEPS = 5
"""Number of shades on each side of the median, a shade for each 10 %: the CSS classes `h-5` to `h5`."""


def draw_stages(stages: Sequence[Stage], page: Page) -> Iterator[Html]:
    yield from _heat(stages)
    if stages:
        yield section("calls", "Calls", draw(_calls(stages), "Calls"))


def _heat(stages: Sequence[Stage]) -> list[Html]:
    """Return a heat map for each role with several processes, or an empty list."""
    roles = roles_of_several(stages)
    if not roles:
        return []
    maps = [part for role, group in roles.items() for part in _map(role, group)]
    scale = [tag("i", class_=f"cell {_shade(1 + step / 10)}") for step in range(-_STEPS, _STEPS + 1)]
    key = tag("p", "half the median ", *scale, " 1.5 times and above", class_="legend")
    note = (
        "Busy time of each process in each stage, concurrent calls counted once, against the stage's median."
    )
    if any(stage.waited for group in roles.values() for stage in group):
        note = f"{note} {WAITS_NOTE}"
    profiled = (share.profiled for stage in stages for share in stage.processes)
    note = f"{note} {say_profiled(*profiled)}".rstrip()
    return [section("ranks", "Busy time by process and stage", key, *maps, note=note)]


def _map(role: str, stages: Sequence[Stage]) -> Iterator[Html]:
    names = list(dict.fromkeys(share.process for stage in stages for share in stage.processes))
    busiest = {stage.slowest for stage in stages}
    drawn = [
        names[at] for at in pick(len(names), CELLS, (i for i, name in enumerate(names) if name in busiest))
    ]
    processes = count(len(names), "process") + (f", {len(drawn)} drawn" if len(drawn) < len(names) else "")
    yield tag("h3", role, tag("small", processes))
    cells = [tag("div", *_cells(stage, drawn), class_="cells") for stage in stages]
    yield illustrated(_summary(role, stages), 1, "by rank", cells)


def _cells(stage: Stage, names: Sequence[str]) -> Iterator[Html]:
    shares = {share.process: share for share in stage.processes}
    median_ns = middle(share.at_work_ns for share in stage.compared)
    for name in names:
        if name in shares:
            yield _cell(stage, shares[name], median_ns, numbered=len(names) <= NUMBERED)
        else:
            yield tag("i", class_="cell none", data_t=f"{name}: did not run it")


def _cell(stage: Stage, share: Share, median_ns: int, *, numbered: bool) -> Html:
    parts, part = _parts(stage, share), share.at_work_ns / median_ns if median_ns else 1.0
    hover = f"{starred(share.process, share.profiled)}: {parts}, {part:.2f} of the median"
    return tag("i", parts if numbered else "", class_=f"cell {_shade(part)}", data_t=hover)


def _shade(part: float) -> str:
    return f"h{max(-_STEPS, min(_STEPS, round((part - 1) * 10)))}"


STAGES = Section(
    name="stages",
    title="Calls",
    compute=lambda sources: stage_times(sources.timeline),
    terminal=stage_blocks,
    html=draw_stages,
    page=PROCESSES,
)
