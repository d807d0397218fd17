"""`stepscope merge`: one timeline of all spans and traces of a step, for Perfetto."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.config import parse_ranges
from stepscope.files.layout import StepLayout
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import RayAddress, absolute, cluster, find_run, find_steps, is_step, of_one_run
from stepscope_report.cli.plain import expect_traces, is_plain
from stepscope_report.formatting import count, size
from stepscope_report.sections.health import NOT_COMPLETE
from stepscope_report.terminal_blocks import listing
from stepscope_report.timeline import Merged, Selection, bytes_to_read
from stepscope_report.timeline.merge.archive import Archived, write_archive
from stepscope_report.timeline.merge.merge import plain_source, step_source, write_merge
from stepscope_report.timeline.otlp_run import is_otlp
from stepscope_report.timeline.plain import plain_bytes

_SHOWN = 20
EVENTS = 6_000_000
"""Number of events above which the command proposes a smaller merge. So many events make about 1.5 GB of
JSON, and a viewer in WebAssembly has 4 GB of memory. The number was chosen, not measured."""


class Arrows(str, Enum):
    """Values of `--requests`."""

    slowest = "slowest"
    all = "all"


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_STEP",
            help="Folder of a run, with --step, or of one step in it. Or traces of torch.profiler and of "
            "engines: files and folders, with --output.",
        ),
    ],
    step: Annotated[
        str | None, typer.Option(metavar="N", help="The step, where the folder is a run's.")
    ] = None,
    roles: Annotated[str | None, typer.Option(help="Only these roles: names or globs, with commas.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Only these ranks: 0,8-15, or 8- for all from 8 on.")
    ] = None,
    from_ms: Annotated[
        float | None,
        typer.Option(
            "--from", metavar="MS", help="Leave out events that end before this, in ms after the opening."
        ),
    ] = None,
    to_ms: Annotated[
        float | None,
        typer.Option(
            "--to", metavar="MS", help="Leave out events that begin after this, in ms after the opening."
        ),
    ] = None,
    max_mb: Annotated[
        float | None,
        typer.Option(help="Largest size of the file, in MB. Spans come first; traces share the rest."),
    ] = None,
    requests: Annotated[
        Arrows,
        typer.Option(help="The trajectories whose turns have arrows to their engine's forward passes."),
    ] = Arrows.slowest,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write. [default: the step's timeline.json.gz]"),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's id, where several wrote into one folder.")
    ] = None,
    ray: RayAddress = None,
    archive: Annotated[
        bool,
        typer.Option(
            "--archive",
            help="Write a TAR of the untouched traces with their places in time, for Perfetto 58 or later.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """One timeline of a step, spans and traces of all processes on one clock, for ui.perfetto.dev."""
    selection = Selection(
        roles=None if roles is None else tuple(role.strip() for role in roles.split(",")),
        ranks=None if ranks is None else parse_ranges(ranks, "--ranks"),
        from_ms=from_ms,
        to_ms=to_ms,
        requests="all" if requests is Arrows.all else None,
        max_mb=max_mb,
    )
    _check_limits(selection)
    if archive and not (from_ms is to_ms is max_mb is None):
        raise CommandError("--archive holds whole traces: leave out --from, --to and --max-mb")
    if is_plain(paths):
        if ray is not None:
            raise CommandError("--ray is for steps of stepscope: name the folder of one")
        if step is not None or run is not None:
            raise CommandError(f"--step and --run are for runs of stepscope, and {paths[0]} is none")
        target, step_path, total = _target_of_plain(paths, output), None, plain_bytes(paths)
    else:
        step_path = absolute(_step_of(paths[0], step, run), ray)
        if ray is not None:
            _fetch(ray, StepLayout(step_path))
        layout = StepLayout(step_path)
        target = output or (layout.timeline.with_name("timeline.tar") if archive else layout.timeline)
        total = bytes_to_read(step_path)
    write: Callable[..., Merged | Archived] = write_archive if archive else write_merge
    with screen.progress("merging", total) as done:
        source = plain_source(paths) if step_path is None else step_source(step_path, run, done)
        merged = write(source, target, selection, done)
    if json:
        screen.show_json(merged)
    elif isinstance(merged, Archived):
        held = f"{count(len(merged.files), 'trace')} and {count(merged.spans, 'span')}"
        screen.say(f"{target}: {held}, {size(target.stat().st_size)}. Perfetto reads it from 58 on")
        _show_rest(merged)
    else:
        _show(merged, target)
        if step_path is not None and merged.events > EVENTS:
            smaller = f"stepscope merge {shlex.quote(str(step_path))} --max-mb 200"
            screen.say(f"A browser may not open so many events. Smaller: {smaller}, or some --ranks")
    raise typer.Exit(_exit(merged))


def _target_of_plain(paths: list[Path], output: Path | None) -> Path:
    """Return the file for the timeline of traces that stepscope did not write.

    Raises:
        CommandError: a path does not exist, the paths hold only spans of OpenTelemetry, or no file is named.
    """
    expect_traces(paths)
    if is_otlp(paths):
        command = f"stepscope report {shlex.join(map(str, paths))}"
        raise CommandError(f"spans of OpenTelemetry alone have a report, and no timeline: {command}")
    if output is None:  # no file is added to folders of other tools
        raise CommandError("stepscope did not write these traces: say where to write with --output")
    return output


def _fetch(ray: str, step: StepLayout) -> None:
    """Fetch the files of a step that exist only on other nodes of the cluster."""
    with cluster(ray, 1, [step]) as nodes, screen.waiting("fetching traces of other nodes"):
        nodes.fetch_traces()


def _exit(written: Merged | Archived) -> Exit:
    return Exit.INCOMPLETE if written.problems or written.incomplete else Exit.OK


def _step_of(path: Path, step: str | None, run: str | None) -> Path:
    if step is not None:
        wanted = find_steps(path, step)
        if len(wanted) > 1:
            raise CommandError(f"--step {step}: {len(wanted)} steps, and a timeline is of one: name one")
        return wanted[0].root
    if is_step(path):
        return path
    steps = of_one_run(path, find_run(path), run).steps  # raises if `path` is no run
    raise CommandError(f"{path} is the folder of a run: give --step too, such as --step {next(iter(steps))}")


def _check_limits(selection: Selection) -> None:
    start, end, max_mb = selection.from_ms, selection.to_ms, selection.max_mb
    for name, ms in (("from", start), ("to", end)):
        if ms is not None and not math.isfinite(ms):
            raise CommandError(f"--{name} is {ms}; give ms after the step's opening")
    if start is not None and end is not None and end <= start:
        raise CommandError(f"--to {end:g} is not after --from {start:g}")
    if max_mb is not None and not 0 < max_mb < math.inf:
        raise CommandError(f"--max-mb is {max_mb:g}; give a size above 0")


def _show(merged: Merged, target: Path) -> None:
    if not merged.rows:
        screen.say("The timeline is empty: no event has these roles, ranks and times.")
    held = f"{count(merged.events, 'event')} of {count(len(merged.rows), 'process')}"
    screen.say(f"{target}: {held}, {size(target.stat().st_size)}. Open it in https://ui.perfetto.dev")
    _show_rest(merged)


def _show_rest(written: Merged | Archived) -> None:
    crossing = 0 if isinstance(written, Archived) else sum(file.crossing for file in written.files)
    if crossing:
        screen.say(f"On a further line of their thread: {count(crossing, 'event')}, which cross others.")
    if written.left_out:
        screen.show(listing("Left out", _some(written.left_out)))
    if written.incomplete:
        screen.show(listing(NOT_COMPLETE, _some(written.incomplete)))
    if written.problems:
        lines = [
            f"{p.file}: {p.what}" + _count(p.events, "event") + _count(p.lines, "line")
            for p in written.problems
        ]
        screen.show(listing("Broken or missing; what could be read was used", _some(lines)))


def _count(number: int | None, what: str) -> str:
    return "" if number is None else f" ({count(number, what)})"


def _some(lines: tuple[str, ...] | list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more: see `stepscope merge --json`"] if more > 0 else [])]
