"""`stepscope report --by`: the calls of each step, grouped by attributes of their spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec
import typer

from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope_report.cli import screen
from stepscope_report.cli.exits import CommandError, Exit
from stepscope_report.formatting import plain
from stepscope_report.groups import ALWAYS, Grouping, attributes_of, group_spans, group_table
from stepscope_report.terminal.layout import draw, markdown_table
from stepscope_report.timeline import Timeline, load_step, span_bytes


class GroupedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one step, grouped by each attribute that was asked for."""

    step: int
    run_id: str
    by: list[Grouping]


class GroupedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `stepscope report --by ATTRIBUTE --json`."""

    format: int = 1
    steps: list[GroupedStep]
    unreadable: dict[str, str]
    """Step folders that could not be read, with the reason."""


def report_groups(
    steps: Sequence[StepLayout], by: Sequence[str], run: str | None, *, json: bool, markdown: bool
) -> NoReturn:
    """Print the groups of these steps and end the command.

    Raises:
        CommandError: no step can be read, or no span has one of the attributes. The message names those
            that are there.
    """
    timelines, unreadable = _read(steps, run)
    grouped = [
        GroupedStep(step=line.step, run_id=line.run_id, by=[group_spans(line, name) for name in by])
        for line in timelines
    ]
    for index, name in enumerate(by):
        if not any(step.by[index].groups for step in grouped):
            stated = (attribute for line in timelines for attribute in attributes_of(line))
            allowed = ", ".join(dict.fromkeys((*ALWAYS, *stated)))
            raise CommandError(f"no span has an attribute {name!r}. Allowed: {allowed}")
    if json:
        screen.show_json(GroupedSteps(steps=grouped, unreadable=unreadable))
    else:
        _show(grouped, markdown=markdown)
    for step, why in unreadable.items():
        screen.warn(f"{step}: {why}")
    raise typer.Exit(Exit.INCOMPLETE if unreadable else Exit.OK)


def _read(steps: Sequence[StepLayout], run: str | None) -> tuple[list[Timeline], dict[str, str]]:
    timelines, unreadable = list[Timeline](), dict[str, str]()
    with screen.progress("reading spans", sum(span_bytes(step.root) for step in steps)) as done:
        for step in steps:
            try:
                timelines.append(load_step(step.root, run_id=run, on_read=done))
            except RecordError as error:
                unreadable[step.root.name] = str(error)
    if not timelines:
        raise CommandError("\n".join(unreadable.values()), Exit.ERROR)
    return timelines, unreadable


def _show(grouped: Sequence[GroupedStep], *, markdown: bool) -> None:
    tables = [
        group_table(grouping, f"Step {step.step} by {grouping.attribute}")
        for step in grouped
        for grouping in step.by
    ]
    if not markdown:
        screen.show(*map(draw, tables))
        return
    parts = (f"### {plain(table.title)}\n\n{markdown_table(table.columns, table.rows)}" for table in tables)
    screen.show_unwrapped("\n\n".join(parts))
