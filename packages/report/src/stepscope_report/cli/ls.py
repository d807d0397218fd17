"""`stepscope ls`: the captured steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from stepscope.errors import RecordError
from stepscope.files.cuda_memory import OutOfMemory, read_out_of_memory
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Recorded, State
from stepscope.files.steps import comparable
from stepscope.files.storage import size_below
from stepscope_report.cli import screen
from stepscope_report.cli.command import Exit
from stepscope_report.cli.find import find_numbered
from stepscope_report.formatting import duration, middle, moment, numbers, size
from stepscope_report.near import Neighbours, is_longer
from stepscope_report.sections.baseline import between_near
from stepscope_report.sections.cause import Cause, cause_of
from stepscope_report.sections.health import say_deaths, step_health
from stepscope_report.table import grouped
from stepscope_report.terminal_blocks import listing, table
from stepscope_report.timeline import Timeline, load_step


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One captured step of one run. Times are in ns."""

    step: int
    run_id: str | None
    """Id of the run. None if no process recorded it."""
    complete: bool
    """True if the step is complete. `ls` does not look for damage inside traces, or between the header and
    the end of a file of spans."""
    state: State | None
    opened_ns: int | None
    """Unix time at which the owner opened the capture. None if the owner recorded nothing."""
    wall_ns: int | None
    """Duration of the step. None if the owner recorded nothing or never closed the capture."""
    uncaptured_ns: int | None
    """Median duration of the uncaptured steps near this step. None if no uncaptured step is known."""
    between_ns: int | None
    """Median time between two uncaptured steps. None if no two such steps are consecutive."""
    processes: int
    artifacts: int
    bytes: int
    """Size of the step's folder on disk, including files of other runs."""
    problems: tuple[str, ...]
    """One line with the reason for each thing that is missing, partial, failed or unreadable."""
    cause: Cause | None = None
    """Cause of a step that took 10 % longer than the steps near it, from spans alone. None for other
    steps."""
    died: str = ""
    """The processes that died in the step, in words. Empty if no process is known to have
    died."""
    error: str | None = None
    """The event that ended the capture early: an exception of the user's code, SIGTERM, or the end of the
    process. None if the capture did not end early."""
    recorder: Recorded | None = None
    """The event for which the flight recorder wrote the step. None if the step was captured."""
    warnings: tuple[str, ...] = ()
    """One line for each thing that took no part in the capture, although the user probably wanted it
    recorded."""
    notes: tuple[str, ...] = ()
    """One line for each remarkable fact that is no problem, such as fewer engine iterations than
    requested."""
    pending: tuple[str, ...] = ()
    """One line for each expected file that has not arrived yet."""


def ls(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_OR_STEP", help="Folder of a run (its save_path), or of one step.")
    ],
    json: Annotated[bool, typer.Option("--json", help="As JSON; times in ns.")] = False,
) -> None:
    """List the captured steps of a run: state, processes, artifacts, size, and what is missing."""
    shortages = read_out_of_memory(RunLayout(run))
    steps = RunLayout(run).steps() if shortages else find_numbered(run)
    near = Neighbours()
    rows = [row for step, layout in steps.items() for row in rows_of(step, layout, near)]
    if json:
        screen.show_json(rows)
    else:
        screen.show(*_render(run, rows), *_out_of_memory(shortages))
    raise typer.Exit(Exit.OK if all(row.complete for row in rows) else Exit.INCOMPLETE)


def rows_of(step: int, layout: StepLayout, near: Neighbours | None = None) -> Iterator[StepRow]:
    """Yield a row for each run that recorded something in a step's folder. A folder that cannot be read has
    one row, with the problem.

    Args:
        near: Captured steps to compare with, for causes. None for rows without causes.
    """
    size_bytes = size_below(layout.root)
    try:
        last = load_step(layout.root, spans=False)
    except (RecordError, OSError) as error:
        yield _empty_row(step, size_bytes, str(error))
        return
    for run_id in last.runs:
        of_run = last if run_id == last.run_id else load_step(layout.root, run_id=run_id, spans=False)
        cause = None if near is None else _cause(layout, of_run, near)
        yield msgspec.structs.replace(_row(step, of_run, size_bytes), cause=cause)


def _cause(layout: StepLayout, timeline: Timeline, near: Neighbours) -> Cause | None:
    """Return the cause of a step that took longer than the steps near it, from spans alone."""
    used = [step.dur_ns for step in comparable(timeline.uncaptured) if step.step != timeline.step]
    if not timeline.window.closed:
        return None
    if not (used and is_longer(timeline.window.wall_ns, middle(used))) and not near.shorter(
        layout.root, timeline
    ):
        return None
    whole = load_step(layout.root, run_id=timeline.run_id)
    return cause_of(whole, near.of(layout.root, whole))


def _empty_row(step: int, size_bytes: int, why: str) -> StepRow:
    return StepRow(
        step=step,
        run_id=None,
        complete=False,
        state=None,
        opened_ns=None,
        wall_ns=None,
        uncaptured_ns=None,
        between_ns=None,
        processes=0,
        artifacts=0,
        bytes=size_bytes,
        problems=(why,),
    )


def _row(step: int, timeline: Timeline, size_bytes: int) -> StepRow:
    health, manifest = step_health(timeline), timeline.manifest
    parts = () if manifest is None else manifest.processes
    pending = () if manifest is None else tuple(manifest.awaited())
    owner = timeline.processes[0] if timeline.window.opened else None
    used = comparable(timeline.uncaptured)
    return StepRow(
        step=step,
        run_id=timeline.run_id,
        complete=health.complete,
        state=health.state,
        opened_ns=None if owner is None else timeline.window.start_ns,
        wall_ns=timeline.window.wall_ns if timeline.window.closed else None,
        uncaptured_ns=middle(step.dur_ns for step in used) if used else None,
        between_ns=between_near(timeline),
        processes=len(timeline.processes),
        artifacts=sum(len(item.artifacts) for part in parts for item in part.expected),
        bytes=size_bytes,
        problems=tuple(line for line in health.doubts if line not in pending),
        died=say_deaths(health),
        error=health.user_error,
        recorder=health.recorder,
        warnings=health.warnings,
        notes=(*filter(None, (health.held,)), *health.notes),
        pending=pending,
    )


def _render(run: Path, rows: Sequence[StepRow]) -> Iterator[RenderableType]:
    columns = (
        ">step", ">run", "state", ">opened, UTC", ">took", ">uncaptured", ">between", ">processes", ">files",
        ">size",
    )  # fmt: skip
    yield table(str(run), columns, map(_cells, rows))
    lists = {
        "Causes": [
            (row, said)
            for row in rows
            for said in (row.died, "" if row.cause is None else row.cause.sentence)
            if said
        ],
        "Ended early, by": [(row, row.error) for row in rows if row.error is not None],
        "Problems": [(row, line) for row in rows for line in row.problems],
        "Not there yet": [(row, line) for row in rows for line in row.pending],
        "Warnings": [(row, line) for row in rows for line in row.warnings],
        "Notes": [(row, line) for row in rows for line in row.notes],
    }
    for title, lines in lists.items():
        if lines:
            of_line = grouped(lines, lambda line: line[1])
            yield listing(title, [f"{_steps_of(rows)}: {line}" for line, rows in of_line.items()])


def _steps_of(lines: Sequence[tuple[StepRow, str]]) -> str:
    steps = numbers(row.step for row, _ in lines)
    return f"step{'' if steps.isdecimal() else 's'} {steps}"


def _out_of_memory(shortages: Sequence[OutOfMemory]) -> Iterator[RenderableType]:
    if shortages:
        columns = ("when", "process", ">step", ">device", ">asked", ">free", "snapshot in oom/")
        yield table("CUDA out of memory", columns, map(_shortage, shortages))


def _shortage(shortage: OutOfMemory) -> tuple[str, ...]:
    return (
        moment(shortage.at_ns),
        shortage.process.key,
        "-" if shortage.step is None else str(shortage.step),
        str(shortage.device),
        size(shortage.asked_bytes),
        size(shortage.free_bytes),
        shortage.snapshot or f"none: {shortage.why_none}",
    )


def _state(row: StepRow) -> str:
    state = row.state or "-"
    if row.recorder is not None:
        return f"{state}, on {row.recorder.trigger}"  # the event that made the flight recorder write
    return state if row.error is None else f"{state}, ended early"


def _cells(row: StepRow) -> tuple[str, ...]:
    return (
        str(row.step),
        row.run_id or "-",
        _state(row),
        "-" if row.opened_ns is None else moment(row.opened_ns).removesuffix(" UTC"),
        duration(row.wall_ns),
        duration(row.uncaptured_ns),
        duration(row.between_ns),
        str(row.processes),
        str(row.artifacts),
        size(row.bytes),
    )
