"""*Counters*: the lowest, mean and highest value of each counter in the step, and devices that were idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.counters import (
    GPU,
    HOST_CPU,
    NPU,
    PROCESS_CPU,
    CounterKind,
    CounterScope,
)
from stepscope_report.accounting import common_ns, joined
from stepscope_report.charts import pick_of_each
from stepscope_report.event_loops import LateLoop, late_loops
from stepscope_report.formatting import LISTED, count, duration, size
from stepscope_report.holds import BusyHost, say_busy_host
from stepscope_report.html import Html, illustrated, percent, section, tag, text
from stepscope_report.sections import DEVICES, Section
from stepscope_report.spans import is_tool, placed
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Counter, Timeline
from stepscope_report.timeline.model import HeldValue, held_values

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page


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


def step_counters(timeline: Timeline) -> Counters | None:
    """Return the counters of the step, or None if no counter was sampled."""
    sampled = _sampled(timeline)
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


def _sampled(timeline: Timeline) -> list[tuple[Counter, list[HeldValue]]]:
    """Return the counters that have values within the step, with these values."""
    values = ((counter, held_values(counter, timeline)) for counter in timeline.counters)
    return [(counter, held) for counter, held in values if held]


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


def _row(counter: Counter, pieces: Sequence[HeldValue], timeline: Timeline) -> CounterRow:
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


def _idle(timeline: Timeline, sampled: Sequence[tuple[Counter, list[HeldValue]]]) -> Iterator[IdleDevice]:
    tools = joined(placed(timeline, (span for span in timeline.spans if is_tool(span.role, span.stage))))
    for counter, pieces in sampled:
        idle = [(piece.start_ns, piece.end_ns) for piece in pieces if piece.value == 0]
        if counter.name in (GPU, NPU) and (idle_ns := sum(end - start for start, end in idle)):
            process = timeline.processes[counter.process]
            tools_ns = common_ns(idle, tools) if process.aligned else 0
            yield IdleDevice(
                device=counter.of or counter.name, host=process.info.host, idle_ns=idle_ns, tools_ns=tools_ns
            )


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
    pieces = _sampled(timeline)
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


def _drawn(row: CounterRow, counter: Counter, pieces: Sequence[HeldValue], page: Page) -> Html:
    if not page.timeline.processes[counter.process].aligned:
        return text("unaligned: not drawn")
    window = page.timeline.window
    return _chart(row, pieces, window.start_ns, window.wall_ns)


def _chart(row: CounterRow, pieces: Sequence[HeldValue], start_ns: int, window_ns: int) -> Html:
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


def _heights(pieces: Sequence[HeldValue], start_ns: int, window_ns: int, first: float) -> dict[int, float]:
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
