"""`stepscope report` and `merge` of traces that stepscope did not write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.text import Text

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import is_step
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.report.formatting import plain
from stepscope.report.plain import Plain
from stepscope.report.terminal.layout import draw
from stepscope.timeline.activity.traces import place_traces
from stepscope.timeline.execution.workers import workers
from stepscope.timeline.step.plain import has_traces, plain_bytes, read_plain


def is_plain(paths: Sequence[Path]) -> bool:
    """Return whether the paths name traces of others: several, or no folder of a run or step."""
    if len(paths) != 1:
        return True
    (path,) = paths
    return not _is_ours(path) and has_traces(path)


def _is_ours(path: Path) -> bool:
    """Return whether a folder is of a step, of a run or of runs, or lies inside a step."""
    layout = RunLayout(path)
    if path.is_file():
        return False
    if is_step(path) or layout.steps() or any(record.is_file() for record in layout.runs()):
        return True
    inside = any(StepLayout(parent).processes.is_dir() for parent in path.absolute().parents)
    return inside or any(RunLayout(child).steps() for child in path.glob("*/"))


def report_plain(paths: Sequence[Path], *, json: bool, output: Path | None, jobs: int | None = None) -> None:
    """Print the report of traces, write its page to `output` if it is named, and exit.

    Raises:
        CommandError: a path does not exist.
        RecordError: no path holds an event of a trace.
        OSError: the page cannot be written.
    """
    _check(paths)
    total = plain_bytes(paths)
    with screen.progress("reading traces", total) as done, workers(jobs, total) as executor:
        step = read_plain(paths, done, executor)
    report = Plain(step.timeline, place_traces(step.files, step.contents, step.timeline))
    if json:
        screen.show_json(report.to_json())
    else:
        screen.show(Text("\n".join(map(plain, report.head())), style="bold"), *map(draw, report.blocks()))
    if output is not None:
        write_atomic(output, report.to_html().encode())
        screen.say(f"Page: {output}")
    raise typer.Exit(Exit.OK if report.complete else Exit.INCOMPLETE)


def target_of(paths: Sequence[Path], output: Path | None) -> Path:
    """Return the file to merge into. Folders of others are left as they are.

    Raises:
        CommandError: a path does not exist, or no file is named.
    """
    _check(paths)
    if output is None:
        raise CommandError("stepscope did not write these traces: say where to write with --output")
    return output


def _check(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise CommandError(f"{path} does not exist")
        if len(paths) > 1 and _is_ours(path):
            raise CommandError(f"{path} is stepscope's own: name it alone")
