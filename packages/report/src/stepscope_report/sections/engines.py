"""*Engines*: the work of each inference replica in the step: time, requests and tokens.

This file is longer than 500 lines because the numbers of a section, its tables and its charts are read
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.files.spans import SERVED, WAITING
from stepscope_report.charts import pick
from stepscope_report.formatting import LISTED, PROFILED, duration, few, percent_of, percents, starred
from stepscope_report.html import (
    EMPTY,
    Colours,
    Html,
    illustrated,
    join,
    legend,
    percent,
    section,
    stacked,
    table,
    tag,
)
from stepscope_report.html.timecharts import axis, zoomed
from stepscope_report.replicas import Replica, find_replicas, mark_of
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.table import Block, Listing, Table, TextTable
from stepscope_report.timeline import Span, Timeline, TraceActivity

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page, Sources

BINS = 120
"""Number of equal time bins for which the mean load is drawn."""
Source: TypeAlias = Literal["iterations", "requests"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Mean numbers of waiting, prefilling and decoding requests in one time bin."""

    start_ns: int
    """Start of the bin in ns after the capture opened."""
    waiting: float
    prefilling: float
    decoding: float


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in the step. The times from `prefill_ns` to `idle_ns` do not overlap, and they add up to
    `recorded_ns`. A field is None if the recording does not state its value.
    """

    replica: str
    """Name of the row: `replica 1`, or the name of a process without a replica number. `requests of trainer`
    stands for requests that the trainer recorded and that name none of several replicas."""
    number: int | None
    processes: tuple[str, ...]
    """Names of the replica's processes in the timeline."""
    rivals: tuple[str, ...] = ()
    """Processes with this replica number that served different trajectories at the same time. These processes
    may be separate engines with the same number by mistake. Empty if there are none."""
    profiled: bool
    """True if a profiler recorded the replica and thereby slowed it."""
    source: Source
    """Source of the times and of `running_mean`. `iterations`: the engine's own annotations in its trace.
    `requests`: the spans `prefill` and `decode` of its requests. A replica that ran nothing has
    `iterations`."""
    iterations: int | None
    """Number of forward passes with at least one request, over all data-parallel engines."""
    iterations_by_engine: tuple[int, ...]
    """`iterations` of each data-parallel engine that was recorded. Empty with source `requests`."""
    window_ns: int
    """Time from the first to the last work of any replica. All rows have the same value."""
    recorded_ns: int
    """Part of `window_ns` that the source covers, including `writing_ns`."""
    prefill_ns: int
    """Time in which the replica only prefilled."""
    decode_ns: int
    """Time in which the replica only decoded."""
    mixed_ns: int
    """Time in which the replica both prefilled and decoded: in one pass, or in several data-parallel
    engines."""
    held_ns: int | None
    """Time in which the replica had requests but ran no pass. With source `requests`, time in which all
    requests waited. If the replica ran nothing at all, the time is from the replica's counter of unfinished
    requests."""
    paused_ns: int | None
    """Time in which the engine was paused, asleep or loading weights. No field above contains this time."""
    writing_ns: int | None
    """Time in which the engine's own profiler started or wrote. No field above contains this time."""
    idle_ns: int | None
    """Part of `recorded_ns` that no field above contains. None if the replica ran nothing but may have had
    requests."""
    requests: int | None
    """Number of requests that ended."""
    prompt_tokens: int | None
    """Prompt tokens of the requests that ended. Without recorded requests, the growth of the engine's
    counter."""
    cached_tokens: int | None
    """Part of `prompt_tokens` that was found in the prefix cache."""
    output_tokens: int | None
    output_tokens_per_s: float | None
    """`output_tokens` divided by the seconds in which the replica had requests. Without recorded requests,
    divided by the seconds from its first pass to its last."""
    prefill_tokens: int | None
    """Tokens that were prefilled in the recorded passes."""
    preemptions: int | None
    running_mean: float | None
    """Mean number of requests that ran at once: in passes (source `iterations`), or in prefill and decode
    (source `requests`). Time without running requests is left out."""
    running_most: int | None
    waiting_mean: float | None
    """Mean number of waiting requests over the time in which the replica had requests. None also if requests
    of an unknown replica waited."""
    waiting_most: int | None
    load: tuple[Load, ...]

    @property
    def is_idle(self) -> bool:
        """Return True if the replica was recorded, ran nothing and had no requests."""
        return self.iterations == 0 and self.held_ns == 0


class Phaseless(msgspec.Struct, frozen=True, kw_only=True):
    """A process that worked in role `rollout` without recorded prefill and decode phases."""

    process: str
    stages: tuple[str, ...]
    """Stages of the process' work."""
    given: bool = False
    """True if engines were given to the capture, but none of their traces names iterations."""
    lost: bool = False
    """True if an SGLang server sent spans of its front end, but none of its scheduler."""


def engine_usage(timeline: Timeline, activities: Sequence[TraceActivity] = ()) -> Table[Engine]:
    """Return a row for each replica that is known to have worked or to have been idle."""
    candidates = find_replicas(timeline, activities)
    replicas = [replica for replica in candidates if _is_known(replica)]
    unplaced = any(_waited(replica) for replica in candidates if not _is_known(replica))
    pieces = [list(_pieces(timeline, replica)) for replica in replicas]
    window = _window(timeline, pieces)
    attributed = any(replica.served for replica in replicas)
    return Table(
        _engine(timeline, replica, own, window, attributed, unplaced)
        for replica, own in zip(replicas, pieces, strict=True)
    )


def phaseless_engines(timeline: Timeline, engines: Sequence[Engine]) -> Table[Phaseless]:
    """Return the processes of replicas that worked and have no row in `engine_usage`.

    Empty if the trace of some engine names iterations, because that engine may run in any of the processes.
    Empty for a program that was instrumented from outside, because its framework does not name the phases.
    Weight syncs, pauses, and waits for a replica are not counted as work.
    """
    unedited = timeline.manifest is not None and timeline.manifest.opened_by == "instrument"
    if unedited or any(engine.source == "iterations" for engine in engines):
        return Table()
    seen = {name for engine in engines for name in engine.processes}
    stages: dict[int, set[str]] = defaultdict(set)
    for span in timeline.spans:
        beside = span.waits or span.stage in _STAGES or mark_of(span) is not None
        if span.role == "rollout" and not beside:
            stages[span.process].add(span.stage)
    named = {span.process for span in timeline.spans if span.role == "rollout" and span.stage in SERVED}
    return Table(
        Phaseless(
            process=process.name,
            stages=tuple(sorted(stages[index])),
            given=timeline.replicas > 0,
            lost=stages[index] >= _SGLANG_FRONT and "scheduler" not in stages[index],
        )
        for index, process in enumerate(timeline.processes)
        if index in stages and process.aligned and process.is_replica
        if index not in named and process.name not in seen
    )


class _Kind(IntEnum):
    """Kind of a piece: a request by its span, requests of a pass, or a state of the replica."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    READS = 3
    WRITES = 4
    BOTH = 5
    """Requests of a pass for which the numbers of prefills and decodes are unknown."""
    RECORDED = 6
    PAUSED = 7
    STALLED = 8
    HELD = 9


_STAGES = {
    **dict.fromkeys(WAITING, _Kind.WAITING),
    "prefill": _Kind.PREFILLING,
    "decode": _Kind.DECODING,
}


class _Piece(NamedTuple):
    start_ns: int
    end_ns: int
    kind: _Kind
    number: int = 1


Levels: TypeAlias = list[int]
"""Number of requests, or of states, at one instant, indexed by `_Kind`."""


def _is_known(replica: Replica) -> bool:
    ran = bool(replica.passes) or any(span.stage not in WAITING for span in replica.served)
    return (
        ran
        or replica.idle
        or (bool(replica.recordings) and all(recording.idle for recording in replica.recordings))
    )


def _waited(replica: Replica) -> bool:
    return any(span.stage in WAITING for span in replica.served)


def _rivals(timeline: Timeline, replica: Replica) -> list[int]:
    """Return the processes of a replica that served at the same time and have no trajectory in common. Empty
    if there are fewer than two.
    """
    served: dict[int, list[Span]] = defaultdict(list)
    for span in replica.served:
        if span.process in replica.processes and span.trajectory is not None:
            served[span.process].append(span)
    trajectories = [{span.trajectory for span in own} for own in served.values()]
    if len(served) < 2 or len(set[str | None]().union(*trajectories)) < sum(map(len, trajectories)):
        return []
    first_ends_ns = min(max(map(timeline.until_ns, own)) for own in served.values())
    last_begins_ns = max(min(span.start_ns for span in own) for own in served.values())
    return sorted(served) if last_begins_ns < first_ends_ns else []


def _pieces(timeline: Timeline, replica: Replica) -> Iterator[_Piece]:
    for span in replica.served:
        yield _Piece(span.start_ns, timeline.until_ns(span), _STAGES[span.stage])
    for start_ns, end_ns, iteration in replica.passes:
        if iteration.prefills:
            kind = _Kind.BOTH if iteration.mixed else _Kind.READS
            yield _Piece(start_ns, end_ns, kind, iteration.prefills)
        if iteration.decodes:
            yield _Piece(start_ns, end_ns, _Kind.WRITES, iteration.decodes)


def _window(timeline: Timeline, pieces: Iterable[Iterable[_Piece]]) -> tuple[int, int]:
    """Return the (start, end) of the work of all replicas, or of the step if no replica worked."""
    work = [piece for own in pieces for piece in own]
    if not work:
        return timeline.window.start_ns, timeline.window.end_ns
    return min(piece.start_ns for piece in work), max(piece.end_ns for piece in work)


def _engine(
    timeline: Timeline,
    replica: Replica,
    work: list[_Piece],
    window: tuple[int, int],
    attributed: bool,
    unplaced: bool,
) -> Engine:
    """Return the row of a replica in the table of engines.

    Args:
        attributed: True if recorded requests name their replicas.
        unplaced: True if requests of an unknown replica waited.
    """
    idle = not work
    source: Source = "iterations" if idle or replica.passes else "requests"
    counted = source == "iterations"
    times = _measure(replica, work, window, source)
    tokens, processes = replica.tokens, timeline.processes
    prefilled = [ran.iteration.prefill_tokens for ran in replica.passes]
    spent, present_ns = times.spent, times.present_ns
    if not replica.served and replica.passes:
        present_ns = max(ran.end_ns for ran in work) - min(ran.start_ns for ran in work)
    known = bool(replica.served) or (idle and (attributed or replica.held is not None))
    waited = bool(replica.served) and (_waited(replica) or not unplaced)
    return Engine(
        replica=replica.name,
        number=replica.number,
        processes=tuple(processes[index].name for index in replica.processes),
        rivals=tuple(processes[index].name for index in _rivals(timeline, replica)),
        profiled=bool(replica.recordings) or any(processes[index].profiled for index in replica.processes),
        source=source,
        iterations=len(replica.passes) if counted else None,
        iterations_by_engine=tuple(len(ran.passes) for ran in replica.recordings) if counted else (),
        window_ns=window[1] - window[0],
        recorded_ns=sum(spent.values()),
        prefill_ns=spent["prefill"],
        decode_ns=spent["decode"],
        mixed_ns=spent["mixed"],
        held_ns=spent["held"] if known else None,
        paused_ns=None if replica.pauses is None else spent["paused"],
        writing_ns=None if replica.stalls is None else spent["stalled"],
        idle_ns=spent["idle"] if known or not idle else None,
        requests=0 if idle and attributed else tokens.requests,
        prompt_tokens=tokens.prompt,
        cached_tokens=tokens.cached,
        output_tokens=tokens.output,
        output_tokens_per_s=None if tokens.output is None else _per(tokens.output * 10**9, present_ns, 1),
        prefill_tokens=None if None in prefilled or not counted else sum(ran or 0 for ran in prefilled),
        preemptions=tokens.preemptions,
        running_mean=_per(times.running, times.running_ns),
        running_most=times.running_most if times.running_ns else None,
        waiting_mean=_per(times.waiting, times.present_ns) if waited else None,
        waiting_most=times.waiting_most if waited else None,
        load=_load(work, window, timeline.window.start_ns),
    )


def _measure(replica: Replica, work: list[_Piece], window: tuple[int, int], source: Source) -> _Times:
    """Add up the times of a replica within the part of the window that the source covers."""
    stretches = [pair for recording in replica.recordings for pair in recording.stretches]
    recorded = stretches if source == "iterations" and stretches else [window]
    around = [
        *(_Piece(start_ns, end_ns, _Kind.RECORDED) for start_ns, end_ns in recorded),
        *(_Piece(start_ns, end_ns, _Kind.PAUSED) for start_ns, end_ns in replica.pauses or ()),
        *(_Piece(start_ns, end_ns, _Kind.STALLED) for start_ns, end_ns in replica.stalls or ()),
    ]
    if not work:  # a replica with passes has no use for the counter: its samples are too far apart
        around += [_Piece(start_ns, end_ns, _Kind.HELD) for start_ns, end_ns in replica.held or ()]
    times = _Times(source)
    for from_ns, until_ns, levels in _levels([*work, *around]):
        times.add(max(from_ns, window[0]), min(until_ns, window[1]), levels)
    return times


_Spent: TypeAlias = Literal["prefill", "decode", "mixed", "held", "paused", "stalled", "idle"]


class _Times:
    def __init__(self, source: Source) -> None:
        self.spent: dict[_Spent, int] = dict.fromkeys(get_args(_Spent), 0)
        self.running = self.running_ns = self.running_most = 0
        self.waiting = self.waiting_most = self.present_ns = 0
        self._by_passes = source == "iterations"

    def add(self, start_ns: int, end_ns: int, levels: Levels) -> None:
        ns = end_ns - start_ns
        if ns <= 0:
            return
        waiting, present = levels[_Kind.WAITING], sum(levels[: _Kind.READS])
        running = sum(levels[_Kind.READS : _Kind.RECORDED]) if self._by_passes else present - waiting
        self.running += running * ns
        self.running_ns += ns * (running > 0)
        self.running_most = max(self.running_most, running)
        self.waiting += waiting * ns
        self.waiting_most = max(self.waiting_most, waiting)
        self.present_ns += ns * (present > 0)
        covered = levels[_Kind.RECORDED] or levels[_Kind.STALLED]
        if covered or (self._by_passes and running):
            self.spent[self._passes(levels) if self._by_passes else self._requests(levels)] += ns

    def _passes(self, levels: Levels) -> _Spent:
        both = levels[_Kind.BOTH] > 0
        work = _work(levels[_Kind.READS] > 0 or both, levels[_Kind.WRITES] > 0 or both)
        held = any(levels[: _Kind.READS]) or levels[_Kind.HELD]
        return work or _stop(levels) or ("held" if held else "idle")

    def _requests(self, levels: Levels) -> _Spent:
        work = _work(levels[_Kind.PREFILLING] > 0, levels[_Kind.DECODING] > 0)
        return _stop(levels) or work or ("held" if levels[_Kind.WAITING] else "idle")


def _work(reads: bool, writes: bool) -> _Spent | None:
    if reads and writes:
        return "mixed"
    return "prefill" if reads else "decode" if writes else None


def _stop(levels: Levels) -> _Spent | None:
    return "stalled" if levels[_Kind.STALLED] else "paused" if levels[_Kind.PAUSED] else None


def _levels(pieces: Iterable[_Piece]) -> Iterator[tuple[int, int, Levels]]:
    """Yield (start, end, levels) for each stretch of time in which no level changes and at least one level is
    above 0. The same list of levels is reused for all stretches.
    """
    changes: dict[int, list[tuple[_Kind, int]]] = defaultdict(list)
    for start_ns, end_ns, kind, number in pieces:
        changes[start_ns].append((kind, number))
        changes[end_ns].append((kind, -number))
    levels, at_ns = [0] * len(_Kind), 0
    for time_ns in sorted(changes):
        if any(levels):
            yield at_ns, time_ns, levels
        for kind, number in changes[time_ns]:
            levels[kind] += number
        at_ns = time_ns


def _per(sum_: int, ns: int, digits: int = 2) -> float | None:
    return round(sum_ / ns, digits) if ns else None


def _load(work: Sequence[_Piece], window: tuple[int, int], opened_ns: int) -> tuple[Load, ...]:
    """Return the mean load of each time bin, from spans of requests if there are any, else from passes. Empty
    if the replica did no work.
    """
    start_ns, end_ns = window
    by_requests = any(piece.kind < _Kind.READS for piece in work)
    width = max(1, -(-(end_ns - start_ns) // BINS))
    sums = [[0, 0, 0] for _ in range(-(-(end_ns - start_ns) // width) if work else 0)]
    for from_ns, until_ns, levels in _levels(work):
        reads = levels[_Kind.READS] + levels[_Kind.BOTH]
        counted = levels[: _Kind.READS] if by_requests else [0, reads, levels[_Kind.WRITES]]
        for at in range((from_ns - start_ns) // width, (until_ns - start_ns - 1) // width + 1):
            left, right = start_ns + at * width, start_ns + (at + 1) * width
            shared = min(until_ns, right) - max(from_ns, left)
            for place, level in enumerate(counted):
                sums[at][place] += level * shared
    return tuple(
        Load(
            start_ns=start_ns + at * width - opened_ns,
            waiting=round(waiting / width, 2),
            prefilling=round(prefilling / width, 2),
            decoding=round(decoding / width, 2),
        )
        for at, (waiting, prefilling, decoding) in enumerate(sums)
    )


def engine_blocks(rows: Sequence[Engine], report: StepReport) -> Iterator[Block]:
    """Yield the times and the requests of each replica, and the processes without phases."""
    if rows:
        yield _times(rows)
        yield request_table(rows)
    if report.phaseless:
        yield Listing("No engine phases", (say_phaseless(report.phaseless),))


_LOST = (
    ", and SGLang sent no span of its scheduler, as versions with several tokenizer or detokenizer workers "
    "do. Fix: one worker of each, or give the engine to capture(engines=...)"
)
_SGLANG_FRONT = {"request", "tokenizer", "api_server_dispatch"}
"""Stages of the front end of an SGLang server."""
_NAME_PHASES = {
    False: (
        'Call them `prefill` and `decode`, as in span("decode", role="rollout"), or give the engine to '
        "capture(engines=...)"
    ),
    True: (
        'Call them `prefill` and `decode`, as in span("decode", role="rollout"): no trace of the engines '
        "given names their iterations"
    ),
}
"""Advice on how to record the phases, by `Phaseless.given`."""


def say_phaseless(rows: Sequence[Phaseless]) -> str:
    """Return a sentence that names the processes without phases, with advice on how to record the phases."""
    names = few([row.process for row in rows], LISTED)
    stages = ", ".join(sorted({stage for row in rows for stage in row.stages})[:LISTED])
    fix = _LOST if any(row.lost for row in rows) else f". {_NAME_PHASES[rows[0].given]}"
    return (
        f"{names}: unknown when they read prompts and when they wrote tokens; their stages are {stages}{fix}"
    )


PHASES = ("prefill", "decode", "mixed", "held up", "paused", "writing", "idle")
ENGINE_NOTE = (
    "In percent of the recorded time. prefill, decode, mixed: passes that read prompts, wrote tokens, or did "
    "both. held up: no pass, though there were requests. From the engine's own iterations if its trace "
    "names them, else from spans of requests. -: not known."
)
REQUESTS_NOTE = (
    "From requests that ended, else from the engine's own counters. prompt, tokens: tokens read and written. "
    "cached: share of the prompt in the prefix cache. tokens/s: while it had requests. running, waiting: "
    "mean number of requests while there were any (and the largest number)."
)
REQUEST_COLUMNS = (
    "replica", ">requests", ">prompt", ">cached", ">tokens", ">tokens/s", ">preempted",
    ">running", ">waiting",
)  # fmt: skip


def _times(rows: Sequence[Engine]) -> TextTable:
    columns = ("replica", ">iterations", ">recorded", *(f">{phase}" for phase in PHASES))
    cells = tuple(
        (
            name_engine(row, rows),
            iterations_of(row),
            duration(row.recorded_ns),
            *(part or "-" for part in shares_of(row)),
        )
        for row in rows
    )
    return TextTable("Engines", columns, cells, engine_note(rows), noun="replica")


def request_table(rows: Sequence[Engine]) -> TextTable:
    cells = tuple(map(_request_cells, rows))
    return TextTable("Requests of engines", REQUEST_COLUMNS, cells, REQUESTS_NOTE, noun="replica")


def name_engine(row: Engine, rows: Sequence[Engine]) -> str:
    """Return the name of a row, with a `*` if a profiler recorded this replica but not every replica."""
    return starred(row.replica, row.profiled and not all(other.profiled for other in rows))


def engine_note(rows: Sequence[Engine]) -> str:
    differ = len({row.profiled for row in rows}) > 1
    return f"{ENGINE_NOTE} {PROFILED}" if differ else ENGINE_NOTE


def iterations_of(row: Engine) -> str:
    """Return the number of iterations: `0 (idle)`, `50`, or with several data-parallel engines `50 (24 +
    26)`.
    """
    if row.is_idle:
        return "0 (idle)"
    parts = row.iterations_by_engine
    apart = f" ({' + '.join(f'{number:,}' for number in parts)})" if len(parts) > 1 else ""
    return f"{known(row.iterations)}{apart}"


def engine_times(row: Engine) -> tuple[int | None, ...]:
    """Return the times of a row in ns, in the order of `PHASES`. A time is None if it is unknown."""
    return (
        row.prefill_ns, row.decode_ns, row.mixed_ns, row.held_ns, row.paused_ns, row.writing_ns, row.idle_ns,
    )  # fmt: skip


def shares_of(row: Engine) -> list[str]:
    """Return the times of a row as percentages of `recorded_ns`, in the order of `PHASES`. Unknown times are
    empty.
    """
    times = engine_times(row)
    shares = iter(percents([ns for ns in times if ns is not None], row.recorded_ns))
    return ["" if ns is None else next(shares) for ns in times]


def _request_cells(row: Engine) -> tuple[str, ...]:
    cached = "-"
    if row.cached_tokens is not None and row.prompt_tokens:
        cached = f"{percent_of(row.cached_tokens, row.prompt_tokens)} %"
    rate = row.output_tokens_per_s
    return (
        row.replica,
        known(row.requests),
        known(row.prompt_tokens),
        cached,
        known(row.output_tokens),
        known(rate if rate is None or rate < 100 else round(rate)),
        known(row.preemptions),
        _at_once(row.running_mean, row.running_most),
        _at_once(row.waiting_mean, row.waiting_most),
    )


def _at_once(mean: float | None, most: int | None) -> str:
    """Return the mean and the largest number of requests at once, as text: `3.8 (12)`, or `-` if unknown."""
    return known(mean) if mean is None else f"{mean:,.1f} ({known(most)})"


def known(value: float | None) -> str:
    """Return a number as text: `1,234`, `3.79`, or `-` for None."""
    return "-" if value is None else f"{value:,}"


CHARTS = 16
"""Number of replicas whose load is drawn."""
_PARTS = ("decode", "prefill", "queue")


def draw_engines(rows: Sequence[Engine], page: Page) -> Iterator[Html]:
    """Yield the tables and charts of the engines, and the names of processes without phases."""
    phaseless = page.report.phaseless
    unnamed = tag("p", f"{say_phaseless(phaseless)}.", class_="note") if phaseless else EMPTY
    if rows:
        yield _engines(rows, unnamed, page.report.breakdown.window_ns, page.colours)
    elif phaseless:
        yield section("engines", "Engines", unnamed)


def _engines(rows: Sequence[Engine], unnamed: Html, window_ns: int, colours: Colours) -> Html:
    chart, height = _chart([row for row in rows if row.load], window_ns, colours)
    named = [(_colour(phase, colours), phase) for phase in PHASES]
    block = _times(rows)
    times = illustrated(block, 1, "time", [_bar(row, named) for row in rows], "engine-table")
    asked = request_table(rows)
    requests = table(asked.columns, asked.rows, "engine-requests")
    note = f"{height} {block.note} {REQUESTS_NOTE}".lstrip()
    return section("engines", "Engines", chart, legend(named), times, requests, unnamed, note=note)


def _chart(rows: Sequence[Engine], window_ns: int, colours: Colours) -> tuple[Html, str]:
    """Return the drawing of the load of some replicas, and a note on its scale. Both are empty if no replica
    has a load.
    """
    if not rows:
        return EMPTY, ""
    highest = max(sum(_drawn_levels(load)) for row in rows for load in row.load) or 1.0
    busiest = max(range(len(rows)), key=lambda at: rows[at].decode_ns + rows[at].mixed_ns)
    picked = [rows[at] for at in pick(len(rows), CHARTS, [busiest])]
    charts = [_drawn_load(row, highest, window_ns, colours) for row in picked]
    body = tag("div", axis(window_ns), *charts, class_="chart", id="engine-load", data_ns=window_ns)
    note = (
        "Height: requests in decode, in prefill, and waiting, on average over each bar, of at most "
        f"{highest:.1f}."
    )
    if len(picked) < len(rows):
        note += f" Drawn are {len(picked)} of {len(rows):,} replicas, evenly chosen, and the busiest."
    return join(colours.legend([("rollout", part) for part in _PARTS]), body), note


def _colour(phase: str, colours: Colours) -> str:
    """Return the CSS class of the stage named `phase`: a stage has the same colour on the whole page."""
    stage = "rollout", phase
    return colours.of(stage) if stage in colours.labels else f"e-{phase.split()[0]}"


def _bar(row: Engine, named: Sequence[tuple[str, str]]) -> Html:
    times = zip(named, engine_times(row), strict=True)
    parts = ((css, ns, f"{phase} {duration(ns)}") for (css, phase), ns in times if ns)
    return stacked(parts, row.recorded_ns)


def _drawn_levels(load: Load) -> tuple[float, float, float]:
    return load.decoding, load.prefilling, load.waiting


def _drawn_load(row: Engine, top: float, window_ns: int, colours: Colours) -> Html:
    """Return stacked bars of the decoding, prefilling and waiting requests, from the bottom up."""
    bars = []
    width_ns = row.load[1].start_ns - row.load[0].start_ns if len(row.load) > 1 else row.window_ns
    for load in row.load:
        below = 0.0
        hover = f"{load.decoding:g} in decode, {load.prefilling:g} in prefill, {load.waiting:g} waiting"
        for part, level in zip(_PARTS, _drawn_levels(load), strict=True):
            if level:
                place = (
                    f"left:{percent(load.start_ns, window_ns)};width:{percent(1.05 * width_ns, window_ns)};"
                    f"bottom:{percent(below, top)};height:{percent(level, top)}"
                )
                bars.append(tag("i", class_=f"m {colours.of(('rollout', part))}", style=place, data_t=hover))
                below += level
    name, track = tag("span", row.replica, class_="name"), zoomed(bars, "track curve")
    return tag("div", name, track, class_="row", style="height:44px")


ENGINES: Section[Table[Engine]] = Section(
    name="engines",
    title="Engines",
    compute=lambda sources: engine_usage(sources.timeline, sources.activities),
    terminal=engine_blocks,
    html=draw_engines,
    page=ROLLOUT,
)


def _phaseless(sources: Sources) -> tuple[Phaseless, ...]:
    engines: Table[Engine] = sources.value_of(ENGINES)
    return phaseless_engines(sources.timeline, engines)


PHASELESS = Section(
    name="phaseless",  # shown with the engines
    compute=_phaseless,
)
