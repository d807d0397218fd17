"""*Counters*: the lowest, mean and highest value of each counter in the step; idle devices; blocked event
loops.

An event loop is late if other code kept its thread busy while calls waited for the loop. This is one file
because all parts read the same samples.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.files.counters import (
    BLOCKED_NS,
    CORE_WAIT,
    EVENT_LOOP,
    GPU,
    HOST_CPU,
    IN,
    NPU,
    PROCESS_CPU,
    RUNNING_REQUESTS,
    UNFINISHED_REQUESTS,
    WAITING_REQUESTS,
    CounterKind,
    CounterScope,
)
from stepscope_report.accounting import Label, Pair, clipped, common_ns, joined, union_ns
from stepscope_report.charts import pick_of_each
from stepscope_report.formatting import LISTED, count, duration, size
from stepscope_report.html import Html, illustrated, percent, section, tag, text
from stepscope_report.sections import DEVICES, Section
from stepscope_report.spans import ToolNames, is_tool, label_of, placed
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Counter, Span, Timeline

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page

_CLOSE_NS = 10_000_000
"""Largest difference, in ns, of two times that count as the same time. A sample's time is read shortly before
the sample's values."""


class CounterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one counter in the step."""

    process: str
    """Name of the process that sampled the counter."""
    role: str
    host: str
    scope: CounterScope
    name: str
    of: str
    """The measured object: `GPU 3`, `replica 0`. Empty if the process or the host itself was measured."""
    unit: str
    kind: CounterKind
    samples: int
    """Number of samples in the step."""
    least: float
    mean: float
    """Mean weighted by time: each value counts for the time since the previous sample."""
    most: float
    covered_ns: int
    """Time from the counter's first to its last sample in the step, in ns."""
    increase: float | None = None
    """Growth over the step of a counter that only grows. None for other counters."""


class IdleDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or NPU that was at 0 % for a part of the step."""

    device: str
    host: str
    idle_ns: int
    """Time at 0 %, in ns. Its precision is the interval between samples."""
    tools_ns: int
    """Part of `idle_ns` in which a tool or an environment ran."""


class BusyHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose cores were all busy, and the number of cores that the recorded processes used."""

    host: str
    busy: float
    """Mean load of all cores, in percent."""
    cores: float
    """Mean number of cores that the recorded processes of the host used together."""
    processes: int


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    rows: Table[CounterRow]
    """Rows by process, and within a process in the order of the first samples."""
    late_loops: Table[LateLoop] = Table()
    """Places that blocked an event loop for more than 100 ms at once, the longest first. A place is left out
    if the blocking call was the only call on the thread, because then no recorded call waited."""
    busy_hosts: Table[BusyHost] = Table()
    """Hosts whose cores were all busy, by load, the highest first."""
    idle_devices: Table[IdleDevice]
    """Devices that were at 0 % for some time, the most idle first."""


class Piece(NamedTuple):
    """A value, and the time for which the value holds: from the previous sample to the value's own sample."""

    start_ns: int
    end_ns: int
    value: float


def step_counters(timeline: Timeline) -> Counters | None:
    """Return the counters of the step, or None if no counter was sampled."""
    sampled = [(counter, pieces) for counter in timeline.counters if (pieces := pieces_of(counter, timeline))]
    if not sampled:
        return None
    idle = sorted(_idle(timeline, sampled), key=lambda device: (-device.idle_ns, device.host, device.device))
    rows = Table(_row(counter, pieces, timeline) for counter, pieces in sampled)
    late = sorted(
        late_loops(timeline), key=lambda loop: (-loop.late_ns, loop.process, loop.thread, loop.line)
    )
    return Counters(
        rows=rows,
        late_loops=Table(late),
        busy_hosts=Table(sorted(_busy_hosts(rows), key=lambda host: (-host.busy, host.host))),
        idle_devices=Table(idle),
    )


def _busy_hosts(rows: Sequence[CounterRow]) -> Iterator[BusyHost]:
    for row in rows:
        if row.name == HOST_CPU and row.mean >= ALL_BUSY:
            own = [other.mean for other in rows if (other.name, other.host) == (PROCESS_CPU, row.host)]
            yield BusyHost(host=row.host, busy=row.mean, cores=sum(own) / 100, processes=len(own))


def say_busy_hosts(counters: Counters) -> str:
    """Return a sentence on the busiest host whose cores were all busy, and the number of other such hosts.
    Empty if there is no such host.
    """
    if not counters.busy_hosts:
        return ""
    worst, others = counters.busy_hosts[0], len(counters.busy_hosts) - 1
    so = f" So were those of {count(others, 'other host')}." if others else ""
    return f"{say_busy_host(worst)[:1].upper()}{say_busy_host(worst)[1:]}.{so}"


def say_busy_host(host: BusyHost) -> str:
    """Return the load of a host whose cores were all busy, and the number of cores that the step used, as a
    clause.
    """
    processes = count(host.processes, "process")
    return (
        f"all cores of {host.host} were busy ({host.busy:.0f} %), and {processes} of the step used "
        f"{host.cores:.2g} of them"
    )


def pieces_of(counter: Counter, timeline: Timeline) -> list[Piece]:
    """Return a counter's values within the step, in order of time. The counter's first value has no duration.

    If the clock of the process is unaligned, all values are returned, because their place in the step is
    unknown.
    """
    times = counter.times_ns
    pieces = map(Piece, (*times[:1], *times), times, counter.values)
    if not timeline.processes[counter.process].aligned:
        return list(pieces)
    start_ns, end_ns = timeline.window.start_ns, timeline.window.end_ns
    if counter.kind == "interval" and times and times[0] > end_ns:  # a late sample that covers the step
        return [Piece(start_ns, end_ns, counter.values[0])]
    return [
        Piece(max(piece.start_ns, start_ns), min(piece.end_ns, end_ns), piece.value)
        for piece in pieces
        if piece.end_ns >= start_ns and piece.start_ns <= end_ns
    ]


def requests_held(timeline: Timeline, number: int, role: str) -> list[Pair] | None:
    """Return the stretches in which a replica had requests. None if no counter of its requests was sampled.

    The counter of unanswered requests in the replica's front end is preferred, because that counter
    includes requests that have not reached the scheduler. The last value holds until the end of the step.

    Args:
        number: Number of the replica.
        role: Role of the processes that sample the counter, or empty if only one role has a replica of
            that number.
    """
    own = [
        counter
        for counter in timeline.counters
        if f"{counter.of} ".startswith(f"replica {number} ")
        and timeline.processes[counter.process].aligned
        and role in ("", timeline.processes[counter.process].info.role)
    ]
    named = [counter for counter in own if counter.name == UNFINISHED_REQUESTS]
    sampled = named or [counter for counter in own if counter.name in (RUNNING_REQUESTS, WAITING_REQUESTS)]
    if not sampled:
        return None
    pieces = [piece for counter in sampled for piece in pieces_of(counter, timeline)]
    end_ns = timeline.window.end_ns
    pieces += [Piece(counter.times_ns[-1], end_ns, counter.values[-1]) for counter in sampled]
    return [
        (piece.start_ns, piece.end_ns) for piece in pieces if piece.value and piece.start_ns < piece.end_ns
    ]


def _row(counter: Counter, pieces: Sequence[Piece], timeline: Timeline) -> CounterRow:
    process = timeline.processes[counter.process]
    values = [piece.value for piece in pieces]
    covered_ns = sum(piece.end_ns - piece.start_ns for piece in pieces)
    weighed = sum(piece.value * (piece.end_ns - piece.start_ns) for piece in pieces)
    return CounterRow(
        process=process.name,
        role=process.info.role,
        host=process.info.host,
        scope=counter.scope,
        name=counter.name,
        of=counter.of,
        unit=counter.unit,
        kind=counter.kind,
        samples=len(pieces),
        least=min(values),
        mean=weighed / covered_ns if covered_ns else sum(values) / len(values),
        most=max(values),
        covered_ns=covered_ns,
        increase=values[-1] - _at_start(counter, timeline) if counter.kind == "total" else None,
    )


def _at_start(counter: Counter, timeline: Timeline) -> float:
    """Return the counter's last value before the step, or else its first value."""
    earlier = [
        value
        for at_ns, value in zip(counter.times_ns, counter.values, strict=True)
        if at_ns <= timeline.window.start_ns and timeline.processes[counter.process].aligned
    ]
    return earlier[-1] if earlier else counter.values[0]


def _idle(timeline: Timeline, sampled: Sequence[tuple[Counter, list[Piece]]]) -> Iterator[IdleDevice]:
    tools = joined(placed(timeline, (span for span in timeline.spans if is_tool(span.role, span.stage))))
    for counter, pieces in sampled:
        idle = [(piece.start_ns, piece.end_ns) for piece in pieces if piece.value == 0]
        if counter.name in (GPU, NPU) and (idle_ns := sum(end - start for start, end in idle)):
            process = timeline.processes[counter.process]
            tools_ns = common_ns(idle, tools) if process.aligned else 0
            yield IdleDevice(
                device=counter.of or counter.name, host=process.info.host, idle_ns=idle_ns, tools_ns=tools_ns
            )


class LateLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the code that blocked an event loop, so that waiting calls could not go on."""

    process: str
    role: str
    thread: str
    """Name of the loop's thread."""
    late_ns: int
    """Sum of `blocks`, in ns."""
    blocks: tuple[Pair, ...]
    """(start, end) of each block at this place, in order. Unix time in ns."""
    blocker: Label | None = None
    """(role, stage) of the call that blocked the loop: the call that the sampler found running, else the
    innermost call that ended when the loop ran again. A tool's stage includes its name. None if neither call
    is known."""
    line: str = ""
    """Source line that blocked the loop: `tools.py:33`. Empty if the sampler found no line."""


def say_blocks(loop: LateLoop) -> str:
    """Return how long callbacks waited for the blocks of a place, as a clause."""
    whose = f"on its thread {loop.thread} waited"
    if len(loop.blocks) == 1:
        return f"a callback {whose} for {duration(loop.late_ns)}"
    longest = max(end_ns - start_ns for start_ns, end_ns in loop.blocks)
    return f"callbacks {whose} {len(loop.blocks):,} times, for at most {duration(longest)}"


class _Seen(NamedTuple):
    """A sample that found a call running while the event loop was blocked."""

    at_ns: int
    call: int
    line: str


class _Block(NamedTuple):
    start_ns: int
    end_ns: int
    call: int | None
    """Index of the span that blocked the loop, or None if unknown."""
    line: str


def late_loops(timeline: Timeline) -> Iterator[LateLoop]:
    """Yield each place that blocked an event loop for more than `BLOCKED_NS` at once in the step.

    A block by a recorded call counts only if another recorded call was open on the loop's thread meanwhile.
    Otherwise no recorded call waited for the loop.
    """
    names = ToolNames(timeline)
    counters = grouped(timeline.counters, lambda counter: counter.process)
    calls_of = grouped(range(len(timeline.spans)), lambda index: timeline.spans[index].process)
    for counter in timeline.counters:
        if counter.name != EVENT_LOOP or IN in counter.of:
            continue
        process, beside = timeline.processes[counter.process], counters[counter.process]
        places = [
            other for other in beside if other.name == EVENT_LOOP and other.of.startswith(counter.of + IN)
        ]
        waits = [
            piece
            for other in beside
            if other.name == CORE_WAIT and counter.of == "MainThread"
            for piece in pieces_of(other, timeline)
        ]
        found = defaultdict[tuple[Label | None, str], list[Pair]](list)
        for start_ns, end_ns, calls in _with_calls(counter, calls_of.get(counter.process, ()), timeline):
            for part in _parts(counter, places, calls, start_ns, end_ns, timeline):
                label = None if part.call is None else names.label_of(timeline.spans[part.call])
                if 2 * _without_core_ns(part, waits) >= part.end_ns - part.start_ns:
                    continue
                if _is_beside_others(part, calls, timeline):
                    found[label, part.line].append((part.start_ns, part.end_ns))
        for place in [place for place in found if not place[1]]:  # of a short block, no line was sampled
            lines = [other for other in found if other[0] == place[0] and other[1]]
            if lines:
                found[max(lines, key=lambda other: union_ns(found[other]))] += found.pop(place)
        for (label, line), blocks in found.items():
            yield LateLoop(
                process=process.name,
                role=process.info.role,
                thread=counter.of,
                late_ns=sum(end_ns - start_ns for start_ns, end_ns in blocks),
                blocks=tuple(sorted(blocks)),
                blocker=label,
                line=line,
            )


def _with_calls(
    loop: Counter, calls: Sequence[int], timeline: Timeline
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield (start, end, calls) of each block of a loop. The calls are those that were open after the loop's
    last sample before the block, and the last call that began before the block.

    A step may have 100,000 calls and 1,000 blocks, so the calls of each block are found in one pass.
    """
    spans = timeline.spans
    coming = deque(sorted(calls, key=lambda index: spans[index].start_ns))
    near = list[int]()
    for start_ns, end_ns in sorted(_blocks(loop, timeline)):
        while coming and spans[coming[0]].start_ns <= end_ns:
            near.append(coming.popleft())
        near.sort()
        ran_ns = _ran_ns(loop, start_ns)
        begun = (index for index in near if spans[index].start_ns <= start_ns)
        last = max(begun, key=lambda index: spans[index].start_ns, default=None)
        near = [index for index in near if index == last or timeline.until_ns(spans[index]) > ran_ns]
        yield start_ns, end_ns, near


def _ran_ns(loop: Counter, start_ns: int) -> int:
    """Return the last time before a block at which a sample shows that the loop ran."""
    return max((time for time in loop.times_ns if time < start_ns), default=start_ns)


def _without_core_ns(block: _Block, waits: Sequence[Piece]) -> int:
    """Return the ns of a block in which the loop's thread had work but no free core.

    Args:
        waits: The thread's waits for a core, in percent. Empty if they are unknown.
    """
    return round(
        sum(
            piece.value / 100 * max(0, min(block.end_ns, piece.end_ns) - max(block.start_ns, piece.start_ns))
            for piece in waits
        )
    )


def _parts(
    loop: Counter,
    places: Sequence[Counter],
    calls: Sequence[int],
    start_ns: int,
    end_ns: int,
    timeline: Timeline,
) -> Iterator[_Block]:
    """Yield the block of a loop, divided where the sampler found another call or line running.

    Args:
        places: Counters of the places in the code that blocked the loop.
    """
    seen = sorted(_seen(loop, places, calls, start_ns, end_ns, timeline))
    if not seen:
        call = _blocker(calls, start_ns, end_ns, loop.times_ns[-1], timeline)
        yield _Block(_begin_ns(loop, call, calls, start_ns, timeline), end_ns, call, "")
        return
    runs = [list(own) for _, own in groupby(seen, key=lambda one: (one.call, one.line))]
    since_ns = _begin_ns(loop, seen[0].call, calls, start_ns, timeline)
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        call, until_ns = run[0].call, end_ns
        if following is not None:
            # A blocked thread enters and leaves no span, so the block had ended at the next edge of a span.
            edges = _edges_ns(call, calls, run[-1].at_ns, following[0].at_ns, timeline)
            until_ns = min(edges, default=following[0].at_ns)
        yield _Block(since_ns, until_ns, call, run[0].line)
        since_ns = until_ns


def _begin_ns(
    loop: Counter, call: int | None, calls: Sequence[int], start_ns: int, timeline: Timeline
) -> int:
    """Return the time at which a block of a loop began.

    The loop ran at the last sample before `start_ns`, and whenever a span of its thread began or ended.
    """
    if call is None:
        return start_ns
    edges = _edges_ns(call, calls, _ran_ns(loop, start_ns), start_ns, timeline)
    return max(edges, default=start_ns)


def _edges_ns(
    call: int, calls: Sequence[int], from_ns: int, until_ns: int, timeline: Timeline
) -> Iterator[int]:
    """Yield the times after `from_ns` and before `until_ns` at which spans of the call's thread began or
    ended. Spans below the call are left out.
    """
    spans = timeline.spans
    for index in calls:
        span = spans[index]
        edges = [ns for ns in (span.start_ns, timeline.until_ns(span)) if from_ns < ns < until_ns]
        if edges and span.thread == spans[call].thread and call not in _above(index, spans) - {index}:
            yield from edges


def _blocks(counter: Counter, timeline: Timeline) -> list[Pair]:
    """Return the stretches of the step in which the loop could not run.

    With each sample the sampler schedules a callback on the loop, and the sample's value is the delay of that
    callback so far. A delay of d at time t means that the loop has not run since t - d. Samples of one block
    are joined; the block begins at the last sample at or before t - d.
    """
    longest: dict[int, int] = {}
    start_ns, before_ns = None, counter.times_ns[0]
    aligned, window = timeline.processes[counter.process].aligned, timeline.window
    for at_ns, value in zip(counter.times_ns, counter.values, strict=True):
        late_ns = round(value * 1e6)
        sent_ns = at_ns - late_ns
        if sent_ns + _CLOSE_NS >= before_ns:
            start_ns = None
        before_ns = at_ns
        if late_ns <= BLOCKED_NS or (aligned and not (window.start_ns <= at_ns and sent_ns <= window.end_ns)):
            continue
        if start_ns is None:
            before = (time for time in counter.times_ns if time <= sent_ns + _CLOSE_NS)
            start_ns = max(before, default=sent_ns)
        longest[start_ns] = max(late_ns, longest.get(start_ns, 0))
    return [(start_ns, start_ns + late_ns) for start_ns, late_ns in longest.items()]


def _seen(
    loop: Counter,
    places: Sequence[Counter],
    calls: Sequence[int],
    start_ns: int,
    end_ns: int,
    timeline: Timeline,
) -> Iterator[_Seen]:
    """Yield each sample that found a call of `calls` running during the block. Of several calls with the
    sampled name, the longest in the block counts.
    """
    longest = dict[str, tuple[int, int]]()
    for index in calls:
        span = timeline.spans[index]
        ns = min(end_ns, timeline.until_ns(span)) - max(start_ns, span.start_ns)
        label = f"{span.role} {span.stage}"
        for name in (label, f"{label} {(span.attrs or {}).get('name')}"):
            if ns > longest.get(name, (0, 0))[0]:
                longest[name] = ns, index
    for place in places:
        name, _, line = place.of.removeprefix(loop.of + IN).rpartition(", ")
        if name in longest:
            for at_ns in place.times_ns:
                if start_ns <= at_ns <= end_ns + _CLOSE_NS:
                    yield _Seen(at_ns, longest[name][1], line)


def _blocker(
    calls: Sequence[int], start_ns: int, end_ns: int, last_ns: int, timeline: Timeline
) -> int | None:
    """Return the index of the innermost span in `calls` that ended when the loop ran again. If calls of
    several stages ended then, return the last call that began before the block.

    Return None if no such call ended then, or if the calls fill less than nine tenths of the block.

    Args:
        last_ns: Time of the loop's last sample. If the block lasts until about then, a call that ended later
            may be the blocker too.
    """
    ends_ns = {index: timeline.until_ns(timeline.spans[index]) for index in calls}
    filled = [(timeline.spans[index].start_ns, until_ns) for index, until_ns in ends_ns.items()]
    if union_ns(clipped(filled, start_ns, end_ns)) * 10 < 9 * (end_ns - start_ns):
        return None
    near_ns = max(_CLOSE_NS, (end_ns - start_ns) // 10)
    latest_ns = None if end_ns + near_ns >= last_ns else end_ns + near_ns
    ended = [
        (until_ns, -timeline.spans[index].start_ns, index)
        for index, until_ns in ends_ns.items()
        if timeline.spans[index].start_ns < end_ns
        and until_ns >= end_ns - near_ns
        and (latest_ns is None or until_ns <= latest_ns)
    ]
    if len({label_of(timeline.spans[index]) for *_, index in ended}) <= 1:
        return min(ended)[2] if ended else None
    # Calls whose timers ran out during the block end with it too.
    begun = (index for index in calls if timeline.spans[index].start_ns <= start_ns)
    latest = max(begun, key=lambda index: timeline.spans[index].start_ns, default=None)
    return latest if any(index == latest for *_, index in ended) else None


def _is_beside_others(block: _Block, calls: Sequence[int], timeline: Timeline) -> bool:
    """Return True if another call of `calls`, neither around nor inside the blocker, was open on the
    blocker's thread during the block.
    """
    if block.call is None:
        return True
    spans, blocker = timeline.spans, block.call
    start_ns = max(block.start_ns, spans[blocker].start_ns)
    end_ns = min(block.end_ns, timeline.until_ns(spans[blocker]))
    above = _above(blocker, spans)
    return any(
        index not in above
        and spans[index].thread == spans[blocker].thread
        and spans[index].start_ns < end_ns
        and timeline.until_ns(spans[index]) > start_ns
        and blocker not in _above(index, spans)
        for index in calls
    )


def _above(index: int | None, spans: Sequence[Span]) -> set[int]:
    """Return the indices of a span and of all spans around it."""
    above = set[int]()
    while index is not None:
        above.add(index)
        index = spans[index].parent
    return above


COLUMNS = ("counter", "of", ">least", ">mean", ">most", ">in the step")
NOTE = "in the step: growth of a counter that only grows."


def counter_blocks(counters: Counters | None, report: StepReport) -> Iterator[Block]:
    """Yield the table of counters, or nothing if no counter was sampled. If there are more than `LISTED`
    rows, the table has only the highest row of each counter.
    """
    if counters is None:
        return
    rows: Sequence[CounterRow] = counters.rows
    names = grouped(rows, lambda row: row.name).values()
    highest = [max(own, key=lambda row: (row.increase or 0, row.most)) for own in names]
    shown = rows if len(rows) <= LISTED else highest
    cut = f"Of {count(len(rows), 'row')}, the highest of each counter." if len(shown) < len(rows) else ""
    yield _table(shown, say_busy_hosts(counters), cut)


def _table(rows: Sequence[CounterRow], *notes: str) -> TextTable:
    grows = any(row.increase is not None for row in rows)
    columns = COLUMNS if grows else COLUMNS[:-1]
    cells = tuple(counter_cells(row)[: len(columns)] for row in rows)
    return TextTable("Counters", columns, cells, " ".join(filter(None, (*notes, NOTE if grows else ""))))


def counter_cells(row: CounterRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `COLUMNS`."""
    values = (row.least, row.mean, row.most)
    grown = "" if row.increase is None else quantity(row.increase, row.unit)
    if row.increase is not None:  # the level depends on when the process began, so only the growth is shown
        return (row.name, whose(row), "", "", "", grown)
    return (row.name, whose(row), *(quantity(value, row.unit) for value in values), grown)


def whose(row: CounterRow) -> str:
    """Return the owner of a counter: `node-a`, `GPU 3 of node-a`, `actor 0`, or `rollout 0, replica 0`."""
    if row.scope == "host":
        return f"{row.of} of {row.host}" if row.of else row.host
    return f"{row.process}, {row.of}" if row.of else row.process


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: `41.2 %`, `1.2 GB`, `300 ms`, `17`."""
    if unit == "B" and abs(value) < 1e18:
        return size(round(value))
    if unit == "ms" and abs(value) < 1e12:
        return duration(round(value * 1e6))
    number = f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.3g}"
    if unit == "%" and number != "0":
        number = f"{value:.1f}" if abs(value) < 1e6 else number
    return f"{number} {unit}".rstrip()


ALL_BUSY = 90
"""Least mean load in percent at which all cores of a host count as busy."""
DRAWN = 32
"""Largest number of rows of one counter that are all drawn. If there are more, every k-th row and the highest
row are drawn."""
ROWS = 128
"""Largest number of drawn rows of all counters together. Each counter gets an equal part, but at least four
rows."""
BARS = 120
"""Number of bars in one chart. Each bar shows the highest value in its part of the step."""


def draw_counters(counters: Counters | None, page: Page) -> Iterator[Html]:
    """Yield the table of counters for the page, or nothing if no counter was sampled."""
    if counters is None:
        return
    timeline = page.timeline
    pieces = [(counter, pieces) for counter in timeline.counters if (pieces := pieces_of(counter, timeline))]
    names = len({row.name for row in counters.rows})
    drawn = DRAWN if len(counters.rows) <= ROWS else min(DRAWN, max(4, ROWS // names))
    shown = list(pick_of_each(counters.rows, lambda row: row.name, lambda row: row.most, drawn))
    rows = [counters.rows[at] for at in shown]
    notes = [
        say_busy_hosts(counters),
        "Each bar is the most in its part of the step, of the most in all of it.",
    ]
    if len(shown) < len(counters.rows):
        every = count(len(counters.rows), "row")
        notes.append(f"{len(shown):,} of {every} are shown, and the highest of each.")
    block, charts = _table(rows, *notes), [_drawn(counters.rows[at], *pieces[at], page) for at in shown]
    pictures = illustrated(block, 2, "over the step", charts, "counter-table")
    yield section("counters", "Counters", pictures, note=block.note)


def _drawn(row: CounterRow, counter: Counter, pieces: Sequence[Piece], page: Page) -> Html:
    if not page.timeline.processes[counter.process].aligned:
        return text("unaligned: not drawn")
    window = page.timeline.window
    return _chart(row, pieces, window.start_ns, window.wall_ns)


def _chart(row: CounterRow, pieces: Sequence[Piece], start_ns: int, window_ns: int) -> Html:
    """Return the bar chart of a counter. A counter that only grows is drawn as growth since the start of the
    step.
    """
    first = pieces[0].value if row.increase is not None else 0.0
    heights = _heights(pieces, start_ns, window_ns, first)
    top = max([abs(height) for height in heights.values()], default=0.0) or 1.0
    bars = [
        tag(
            "i",
            class_="m flight",
            style=f"left:{percent(at, BARS)};width:{percent(1.05, BARS)};height:{percent(abs(height), top)}",
            data_t=f"{whose(row)}: {quantity(height, row.unit)} at {duration(window_ns * at // BARS)}",
        )
        for at, height in sorted(heights.items())
        if height
    ]
    return tag("div", *bars, class_="fall curve")


def _heights(pieces: Sequence[Piece], start_ns: int, window_ns: int, first: float) -> dict[int, float]:
    """Return {index of a bar: highest value in its part of the step}."""
    heights: dict[int, float] = {}
    for piece in pieces:
        since, until = (
            min(BARS - 1, max(0, (at_ns - start_ns) * BARS // max(window_ns, 1)))
            for at_ns in (piece.start_ns, max(piece.start_ns, piece.end_ns - 1))
        )
        for bar in range(since, until + 1):
            heights[bar] = max(heights.get(bar, piece.value - first), piece.value - first)
    return heights


COUNTERS = Section(
    name="counters",
    title="Counters",
    compute=lambda sources: step_counters(sources.timeline),
    terminal=counter_blocks,
    html=draw_counters,
    page=DEVICES,
)
