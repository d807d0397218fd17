"""`stepscope watch`: a live view of a run, made from its files alone."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.text import Text

from stepscope.files.layout import RunLayout, StepLayout, safe
from stepscope.files.requests import has_ended, read_listening
from stepscope.files.run import runs_of
from stepscope.files.steps import recorded_runs
from stepscope.files.storage import write_atomic
from stepscope_report.cli import screen
from stepscope_report.cli.asking import dead_owners, fates
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import deaths, no_run
from stepscope_report.cli.ls import rows_of
from stepscope_report.cli.why import ask, say_median, step_lines
from stepscope_report.formatting import count, duration, few, turn
from stepscope_report.live import COLUMNS, Fleet, Live, Sampled, live
from stepscope_report.sections.counters import quantity
from stepscope_report.terminal_blocks import listing, table
from stepscope_report.timeline.sources import latest_counters
from stepscope_report.why import ENDED

BARS = " ▁▂▃▄▅▆▇█"
_WRITTEN = 5
"""Number of captured steps that are listed: the latest on disk."""


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run: its save_path.")],
    every: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the view once, and end.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that reloads itself instead.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the view once, as JSON; times in ns.")] = False,
) -> None:
    """Show a run as it goes: the running step, the last steps, the calls of each role, and the trajectories.

    For runs with a `save_path` and without `record: off`, running or finished. It reads files and opens no
    port. End it with Ctrl-C.
    """
    if not run.is_dir():
        raise CommandError(no_run(run))
    layout = RunLayout(run)
    if not step_lines(layout) and not ask(layout, min(1.5, every)):
        raise CommandError(
            f"{run} has no line of a step yet. Fix: set save_path, and not record: off, in its configuration",
            Exit.INCOMPLETE,
        )
    if json:
        screen.show_json(look(layout, every))
    elif html is not None:
        _show_in_page(layout, html, every, once=once)
    elif once:
        screen.show(*render(layout, look(layout, every)))
    else:
        with Screen(screen=False, auto_refresh=False) as terminal:
            _follow(layout, every, lambda view: terminal.update(Group(*render(layout, view)), refresh=True))


def look(layout: RunLayout, every: float) -> Live:
    """Return the present state of the run. Answers of processes are awaited for at most `every` seconds."""
    number, sampled = _last_counters(layout)
    try:
        states = ask(layout, min(1.5, every))
    except OSError:  # the folder may not be written: what is on disk is shown
        states = []
    workers = {key: name for state in states for key, name in state.workers.items()}
    ended = {key: workers[key] for key, fate in fates(states).items() if fate.startswith(ENDED)}
    return live(
        step_lines(layout),
        states,
        recorded=sampled,
        recorded_step=number,
        dead=list({**ended, **dead_owners(layout, states)}.values()),
    )


def _last_counters(layout: RunLayout) -> tuple[int | None, list[Sampled]]:
    """Return (number, counters) of the last step with files of counters; (None, []) if there is none."""
    run = _run(layout)
    for number, step in _steps(layout, run):
        sampled = [Sampled(process, counters) for process, counters in latest_counters(step, run)]
        if sampled:
            return number, sampled
    return None, []


def _run(layout: RunLayout) -> str:
    """Return the id of the run whose step lines are shown, as file names spell it. Empty if no run wrote step
    lines.
    """
    return next(iter(recorded_runs(layout.root)), "")


def _steps(layout: RunLayout, run: str) -> Iterator[tuple[int, StepLayout]]:
    """Yield the captured steps of a run, the last one first."""
    for number, step in reversed(layout.steps().items()):
        if run in map(safe, runs_of(step)):
            yield number, step


def _follow(layout: RunLayout, every: float, show: Callable[[Live], None]) -> None:
    """Call `show` with the state of the run every `every` seconds, until Ctrl-C."""
    try:
        while True:
            began = time.monotonic()
            show(look(layout, every))
            time.sleep(max(0.0, every - (time.monotonic() - began)))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.OK) from None


def _show_in_page(layout: RunLayout, page: Path, every: float, *, once: bool) -> None:
    def write(view: Live) -> None:
        write_atomic(page, page_of(layout, view, every).encode())

    if once:
        write(look(layout, every))
    else:
        _follow(layout, every, write)


def page_of(layout: RunLayout, view: Live, every: float) -> str:
    """Return the view as an HTML page that reloads itself."""
    console = Console(record=True, width=screen.WIDTH, file=io.StringIO(), markup=False, highlight=False)
    for part in render(layout, view):
        console.print(part)
    text = console.export_html(inline_styles=True, code_format="{code}")
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{max(1, round(every))}">'
        f"<title>{layout.root.name}</title>"
        f'<pre style="font-family: monospace; line-height: 1.3; margin: 2em">{text}</pre>\n'
    )


def render(layout: RunLayout, view: Live) -> Iterator[RenderableType]:
    yield Text(_head(view, layout), style="bold")
    if view.dead:
        yield Text(f"Died: {few(view.dead, 4)}", style="bold")
    yield Text(f"  {_bars(view)}")
    if view.tokens_per_s:
        rates = (f"{kind} {rate:,.0f}" for kind, rate in sorted(view.tokens_per_s.items()))
        yield Text(f"  tokens/s of the last step: {', '.join(rates)}")
    if view.between_ns is not None and view.between_ns * 100 >= (view.median_ns or 0):
        yield Text(f"  between two steps: {duration(view.between_ns)} (median)")
    if view.stages:
        rows = [
            (item.stage, *(duration(round(s * 1e9)) for s in (item.last_s, item.median_s)))
            for item in view.stages[:8]
        ]
        yield table("Stages of the driver", ("stage", ">last step", ">median"), rows, "Sums over calls.")
    if view.lanes:
        lanes = [
            (lane.role, f"{lane.processes:,}", f"{lane.calls:,}", ", ".join(lane.stages[:4]),
             duration(lane.oldest_ns))
            for lane in view.lanes
        ]  # fmt: skip
        yield table("In these calls now", ("role", ">processes", ">calls", "stages", ">oldest"), lanes)
    if view.oldest:
        title = f"{count(view.flights, 'trajectory')} under way, the longest"
        flights = [
            (turn(flight.trajectory, flight.turn), flight.stage, duration(flight.age_ns))
            for flight in view.oldest
        ]
        yield table(title, ("trajectory", "in", ">for"), flights)
    yield from map(_fleet, view.fleets)
    written = list(_written(layout))
    if written:
        yield listing("On disk, the last", written)


def _fleet(fleet: Fleet) -> RenderableType:
    columns = COLUMNS[fleet.group]
    of = "" if fleet.step is None else f", at the end of step {fleet.step}"
    title = f"{count(fleet.number, fleet.group[:-1])}, over 10 s{of}"
    if fleet.spreads:
        units = {column.title: column.unit for column in columns}
        spreads = []
        for spread in fleet.spreads:
            values = (spread.p10, spread.median, spread.p90, spread.worst)
            cells = (quantity(value, units[spread.column]) for value in values)
            spreads.append((spread.column, *cells, spread.whose))
        return table(title, ("", ">p10", ">median", ">p90", ">worst", "whose"), spreads)
    known = [column for column in columns if any(column.title in row.values for row in fleet.rows)]
    rows = []
    for row in fleet.rows:
        measured = [(row.values.get(column.title), column.unit) for column in known]
        cells = ("-" if value is None else quantity(value, unit) for value, unit in measured)
        rows.append((row.name, *cells))
    return table(title, (fleet.group[:-1], *(f">{column.title}" for column in known)), rows)


def _head(view: Live, layout: RunLayout) -> str:
    ended = f"{count(view.steps, 'step')} so far"
    median = ""
    if view.median_ns is not None:
        median = f"; {say_median(view.compared, view.steps)}: {duration(view.median_ns)}"
    if view.running_ns is None and view.answers:
        return f"No step runs; {count(view.answers, 'process')} of the run answered. {ended}{median}"
    if view.running_ns is None:
        listening = read_listening(layout)
        over = bool(listening) and all(map(has_ended, listening))
        gone = "The run has ended" if over else "No process answers: the run has ended, or hangs in C"
        return f"{gone}. {deaths(layout)}{ended}{median}"
    ratio = "" if not view.median_ns else f", {view.running_ns / view.median_ns:.1f} times the median"
    return f"Step {view.running} runs for {duration(view.running_ns)}{ratio}. {ended}{median}"


def _bars(view: Live) -> str:
    longest = max(view.durations_ns, default=0) or 1
    top = len(BARS) - 1
    return "".join(BARS[max(1, round(ns / longest * top))] for ns in view.durations_ns)


def _written(layout: RunLayout) -> Iterator[str]:
    run = _run(layout)
    for number, step in reversed(list(islice(_steps(layout, run), _WRITTEN))):
        for row in (row for row in rows_of(number, step) if safe(row.run_id or "") == run):
            why = "captured" if row.recorder is None else f"{row.recorder.trigger}: {row.recorder.reason}"
            died = f"{row.died}; " if row.died else ""
            yield f"step {number}, {duration(row.wall_ns)}, {died}{why}"
