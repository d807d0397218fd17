"""Traces that stepscope did not write, for `report`, `merge` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.text import Text

from stepscope.config import parse_steps
from stepscope.errors import ConfigError
from stepscope.files.storage import write_atomic
from stepscope_report.brief import brief_markdown, brief_text, step_brief
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.formatting import plain
from stepscope_report.html.step_page import render_step
from stepscope_report.plain import Plain, PlainSteps, plain_steps
from stepscope_report.report import step_report
from stepscope_report.terminal import render
from stepscope_report.terminal_blocks import draw
from stepscope_report.timeline.otlp_run import is_otlp, load_otlp
from stepscope_report.timeline.plain import has_traces, is_ours, plain_bytes, read_plain
from stepscope_report.timeline.processes import workers


def is_plain(paths: Sequence[Path]) -> bool:
    """Return True if the paths name traces of other tools: several paths, or one path that is no folder
    of a run or step.
    """
    if len(paths) != 1:
        return True
    (path,) = paths
    return not is_ours(path) and (has_traces(path) or is_otlp(paths))


def report_plain(
    paths: Sequence[Path],
    output: Path | None,
    jobs: int | None,
    step_mark: str | None = None,
    steps: str | None = None,
    *,
    json: bool,
    brief: bool,
    markdown: bool,
) -> NoReturn:
    """Print the report of traces, write its page to `output` if that is given, and exit.

    Raises:
        CommandError: a path does not exist, or `steps` are given for spans of OpenTelemetry, which are one
            step.
        ConfigError: `steps` is no range, or `step_mark` matches no range in the traces.
        RecordError: no path holds an event of a trace, or no trace has one of `steps`.
        OSError: the page cannot be written.
    """
    expect_traces(paths)
    wanted = _wanted(steps, "--step")
    if is_otlp(paths):
        if wanted is not None:
            raise CommandError("--step: spans of OpenTelemetry are one step")
        report_otlp(paths, output, json=json, brief=brief, markdown=markdown)
    total = plain_bytes(paths)
    with screen.progress("reading traces", total) as done, workers(jobs, total) as executor:
        step = read_plain(paths, done, executor, step_mark, wanted)
    report = Plain(step)
    if step_mark is not None and not report.steps:
        expected = f"the name of a range: {report.names()}"
        raise ConfigError("--step-mark", step_mark, expected, "name one of these; * is any text")
    if json:
        screen.show_json(report.to_json())
    elif brief:
        parts = report.brief(paths, {"--step": steps, "--step-mark": step_mark})
        screen.show_unwrapped((brief_markdown if markdown else brief_text)(parts))
    else:
        screen.show(Text("\n".join(map(plain, report.head())), style="bold"), *map(draw, report.blocks()))
    if output is not None:
        write_atomic(output, report.to_html().encode())
        screen.say(f"Page: {output}")
    raise typer.Exit(Exit.OK if report.complete else Exit.INCOMPLETE)


def expect_plain(a: Path, b: Path, options: Sequence[str]) -> None:
    """Raise `CommandError` if only one of the two sides is traces of other tools, or if an option needs a
    run.
    """
    for path, other in ((a, b), (b, a)):
        if not is_plain([path]):
            raise CommandError(f"{other} is traces of others, and {path} is not: compare two of a kind")
    if options:
        raise CommandError(f"{', '.join(options)}: only of a run or a step of stepscope")


def read_plain_steps(path: Path, steps: str | None, option: str, step_mark: str | None) -> PlainSteps:
    """Return the steps in traces.

    Raises:
        CommandError: the path does not exist, or no trace shows its steps.
        ConfigError: `steps` is no range, or names no step.
    """
    expect_traces([path])
    report = Plain(read_plain([path], step_mark=step_mark))
    if not report.steps:
        raise CommandError(
            f"{path}: no trace tells its steps. Call profiler.step() after each, or name the range that is "
            f"one step with --step-mark: {report.names()}"
        )
    wanted = _wanted(steps, option) or (lambda _: True)
    found = plain_steps(path.name, report, wanted)
    if not found.parts:
        present = ", ".join(map(str, sorted({row.step for row in report.steps})))
        raise ConfigError(option, steps, f"steps of the traces: {present}", "name some of these")
    return found


def _wanted(steps: str | None, option: str) -> Callable[[int], bool] | None:
    """Return a function that is True for the numbers of the selected steps. None if `steps` is None."""
    if steps is None:
        return None
    parts = parse_steps(steps, option)
    return lambda step: any(step in part for part in parts)


def report_otlp(
    paths: Sequence[Path], output: Path | None, *, json: bool, brief: bool, markdown: bool
) -> NoReturn:
    """Print the report of OpenTelemetry's spans as one step, write its page to `output`, and exit.

    Raises:
        RecordError: no path holds a span.
        OSError: the page cannot be written.
    """
    timeline = load_otlp(paths)
    report = step_report(timeline)
    if json:
        screen.show_json({"format": 1, "steps": [report], "unreadable": {}})  # the same keys as for a run
    elif brief:
        screen.show_unwrapped((brief_markdown if markdown else brief_text)(step_brief(report)))
    else:
        screen.show(render(report))
    if output is not None:
        write_atomic(output, render_step(timeline, report).encode())
        screen.say(f"Page: {output}")
    raise typer.Exit(Exit.OK if report.health.complete else Exit.INCOMPLETE)


def expect_traces(paths: Sequence[Path]) -> None:
    """Raise `CommandError` if a path does not exist, or if a run or step of stepscope is among
    other traces.
    """
    for path in paths:
        if not path.exists():
            raise CommandError(f"{path} does not exist")
        if len(paths) > 1 and is_ours(path):
            raise CommandError(f"{path} is of a run of stepscope: name one run, or one step, at a time")
