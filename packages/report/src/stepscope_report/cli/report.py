"""`stepscope report`: where the time of each captured step went, in the terminal, as JSON, and as pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import msgspec
import typer

from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.storage import write_atomic
from stepscope_report import StepReport, step_report
from stepscope_report.brief import brief_markdown, brief_text, read_first, run_brief
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit, takes
from stepscope_report.cli.find import (
    STEPS_HELP,
    RayAddress,
    absolute,
    find_of_run,
    find_run,
    find_steps,
    is_step,
    readers,
)
from stepscope_report.cli.plain import is_plain, report_plain
from stepscope_report.demo import unpack_sample
from stepscope_report.diff import step_changes
from stepscope_report.formatting import plain
from stepscope_report.groups import ALWAYS, Grouping, attributes_of, group_spans, group_table
from stepscope_report.html.run_page import RunStep, render_run
from stepscope_report.html.step_page import render_step
from stepscope_report.near import Neighbours
from stepscope_report.terminal import render, render_overview, render_short
from stepscope_report.terminal_blocks import draw, markdown_table
from stepscope_report.timeline import Timeline, Traces, bytes_to_read, load_step, load_traces, span_bytes

SAMPLE = Path("outputs/sample")
"""Folder that the sample run is unpacked into if the command line names none."""


OnTraces: TypeAlias = Callable[[StepLayout, Timeline, Traces], None]


class Reports(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope report --json`."""

    format: int = 1
    steps: list[StepReport]
    unreadable: dict[str, str]
    """Reason why a step could not be read, by its folder."""
    others: dict[str, list[int]] = {}
    """Steps of other runs in the folder, which are left out, by the id of the run."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options and arguments of `stepscope report`."""

    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_OR_STEP",
            help="Folder of a run, or of one step in it. Or traces of torch.profiler and of engines: files "
            "and folders.",
        ),
    ] = None
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None
    run: Annotated[str | None, typer.Option(help="The run's id, where several wrote into one folder.")] = None
    json: Annotated[bool, typer.Option("--json", help="The tables as JSON; times in ns.")] = False
    html: Annotated[
        bool | None,
        typer.Option(
            "--html/--no-html",
            help="Write report.html into each step's folder and into the run's. Default: unless --json or "
            "--brief.",
        ),
    ] = None
    short: Annotated[
        bool | None,
        typer.Option(
            "--short/--full",
            help="The time, the first advice and where it went, or all tables. Default: full for one step.",
        ),
    ] = None
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="A summary in at most 40 lines; for a run, of the step that failed, else the longest.",
        ),
    ] = False
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTRIBUTE",
            help="Only the calls, grouped: by tool, env, name, or any attribute of spans.",
        ),
    ] = None
    markdown: Annotated[bool, typer.Option("--markdown", help="With --brief or --by: as Markdown.")] = False
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Read the profilers' traces as well as the spans.")
    ] = True
    digests: Annotated[
        bool,
        typer.Option(
            "--digests/--no-digests",
            help="Use the digests of an earlier report, or read the traces again; same result.",
        ),
    ] = True
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="Processes that read traces; same result. Default: idle cores, or 1 if traces are small.",
        ),
    ] = None
    ray: RayAddress = None
    sample: Annotated[
        bool,
        typer.Option(
            "--sample",
            help=f"Show a run that comes with stepscope. It is unpacked into {SAMPLE}, or the folder given.",
        ),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the page of traces that stepscope did not write."),
    ] = None

    step_mark: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="For traces of other tools: name of the range that is one step. * is any text.",
        ),
    ] = None

    @property
    def path(self) -> Path:
        """The first folder or trace on the command line, or the folder of the sample."""
        if not self.paths and not self.sample:
            raise typer.BadParameter(
                "name the folder of a run, or traces, or use --sample", param_hint="RUN_OR_STEP"
            )
        return self.paths[0] if self.paths else SAMPLE

    def check(self) -> None:
        """Raise `typer.BadParameter` if the options cannot be combined."""
        if self.markdown and not (self.brief or self.by):
            raise typer.BadParameter("--markdown needs --brief or --by")
        if self.json and (self.brief or self.markdown):
            raise typer.BadParameter(f"{'--brief' if self.brief else '--markdown'} goes without --json")
        if self.by and (self.brief or self.html or self.short or self.ray):
            raise typer.BadParameter("--by goes without --brief, --html, --short and --ray")


@takes(Asked)
def report(asked: Asked) -> None:
    """Show where each captured step went: tables by role and stage, ranks, long tail, and what is missing."""
    if asked.sample:
        unpack_sample(asked.path)
        screen.say(
            f"The sample is in {asked.path}: a run of `stepscope demo`, recorded on CPUs, "
            "with two captured steps"
        )
    asked.check()
    if asked.paths and not asked.sample and is_plain(asked.paths):
        report_traces(asked, asked.paths)
    if asked.output is not None or asked.step_mark is not None:
        find_steps(asked.path)  # a missing run is reported before a wrong option
        option = "--output" if asked.step_mark is None else "--step-mark"
        raise typer.BadParameter(f"{option} is for traces that stepscope did not write")
    if asked.by:
        chosen = find_of_run(asked.path, asked.step, asked.run)
        steps = list(chosen.steps.values())
        report_groups(steps, asked.by, chosen.run_id, json=asked.json, markdown=asked.markdown)
    report_steps(asked)


def report_traces(asked: Asked, paths: list[Path]) -> NoReturn:
    """Print the report of traces that stepscope did not write, and exit."""
    html = asked.html or None  # --no-html is the default here
    ours = {"--run": asked.run, "--html": html, "--by": asked.by or None}
    if given := [name for name, value in {**ours, "--ray": asked.ray}.items() if value is not None]:
        needed = f"{', '.join(given)}: only of a run or a step of stepscope"
        raise typer.BadParameter(f"{needed}, and {asked.path} is none; --output FILE writes the page")
    report_plain(
        paths,
        asked.output,
        asked.jobs,
        asked.step_mark,
        asked.step,
        json=asked.json,
        brief=asked.brief,
        markdown=asked.markdown,
    )


def report_steps(asked: Asked) -> NoReturn:
    """Print the reports of a run's steps, write their pages, and exit."""
    wants_pages = asked.html or (asked.html is None and not (asked.json or asked.brief))
    pages = Pages() if wants_pages else None
    chosen = find_of_run(absolute(asked.path, asked.ray), asked.step, asked.run)
    reports = read_reports(
        list(chosen.steps.values()),
        chosen.run_id,
        pages,
        traces=asked.traces,
        jobs=asked.jobs,
        ray=asked.ray,
        digests=asked.digests,
    )
    reports = msgspec.structs.replace(reports, others=chosen.others)
    if pages is not None and asked.step is None and not is_step(asked.path):
        pages.add_run(RunLayout(asked.path), reports.steps, reports.unreadable, chosen.others)
    if asked.json:
        screen.show_json(reports)
    elif asked.brief:
        show_brief(reports, asked.path, markdown=asked.markdown)
    else:
        show_reports(reports, short=len(reports.steps) > 1 if asked.short is None else asked.short)
    failed = False if pages is None else say_pages(pages)
    complete = all(result.health.complete for result in reports.steps)
    raise typer.Exit(Exit.OK if complete and not (reports.unreadable or failed) else Exit.INCOMPLETE)


def read_reports(
    steps: list[StepLayout],
    run: str | None = None,
    pages: Pages | None = None,
    *,
    traces: bool = False,
    jobs: int | None = None,
    digests: bool = True,
    ray: str | None = None,
    on_traces: OnTraces | None = None,
) -> Reports:
    """Return the reports of these steps and write their pages. A progress bar is shown meanwhile.

    Args:
        run: Id of the run. None for the run that captured last.
        pages: Writer of the pages. None to write none.
        traces: True to read the profilers' traces, which are large.
        jobs: Number of processes that read the traces. None to let `workers` choose.
        digests: True to use what an earlier report kept of the traces.
        ray: Address of the Ray cluster whose nodes read the traces. None to read them on this machine.
        on_traces: Function that is called with the traces of each step. None for none.

    Raises:
        CommandError: no step can be reported.
    """
    measure = bytes_to_read if traces else span_bytes
    what = "reading spans and traces" if traces else "reading spans"
    processes = readers(jobs if traces else 1, ray, steps, lambda: sum(measure(step.root) for step in steps))
    with processes as (executor, total), screen.progress(what, total) as done:
        load = partial(load_step, run_id=run, on_read=done, digests=digests, executor=executor)
        traces_of = partial(load_traces, on_read=done, executor=executor, digests=digests) if traces else None
        near = Neighbours()
        read = {step.root.name: _read(step, load, pages, traces_of, on_traces, near) for step in steps}
    reports = [outcome for outcome in read.values() if isinstance(outcome, StepReport)]
    unreadable = {name: outcome for name, outcome in read.items() if isinstance(outcome, str)}
    if not reports:
        raise CommandError("\n".join(unreadable.values()), Exit.ERROR)
    return Reports(steps=reports, unreadable=unreadable)


def _read(
    step: StepLayout,
    load: Callable[[Path], Timeline],
    pages: Pages | None,
    traces_of: Callable[[Path, Timeline], Traces] | None,
    on_traces: OnTraces | None,
    near: Neighbours,
) -> StepReport | str:
    screen.log.debug("reading %s", step.root)
    try:
        timeline = load(step.root)
    except (RecordError, OSError) as error:
        return str(error)
    traces = None if traces_of is None else traces_of(step.root, timeline)
    if traces is not None and on_traces is not None:
        on_traces(step, timeline, traces)
    result = step_report(timeline, traces, near.of(step.root, timeline))
    if pages is not None:
        pages.add_step(step, timeline, result)
    return result


def say_pages(pages: Pages) -> bool:
    """Print the paths of the written pages, the run's page first, and the pages that could not be written.
    Return True if a page could not be written.
    """
    if pages.written:
        *others, first = pages.written
        more = (
            f" and {len(others)} for its steps" if len(others) > 1 else f" and {others[0]}" if others else ""
        )
        screen.say(f"Page: {first}{more}")
    for failure in pages.failed:
        screen.warn(f"error: {failure}")
    return bool(pages.failed)


def show_reports(reports: Reports, *, short: bool = False) -> None:
    """Print the tables of all reports (only the most important ones if `short`). Several steps also have an
    overview.
    """
    screen.show(*((render_short if short else render)(report) for report in reports.steps))
    if len(reports.steps) > 1:
        screen.show(render_overview(reports.steps), draw(step_changes(reports.steps)))
    for step, why in reports.unreadable.items():
        screen.warn(f"{step}: {why}")
    if short:
        first, why = read_first(reports.steps)
        of_one = (
            f", or --step {first.step} for the one to read first: {why}" if len(reports.steps) > 1 else ""
        )
        screen.say(f"All tables: --full{of_one}")


def show_brief(reports: Reports, path: Path, *, markdown: bool = False) -> None:
    """Print the brief of a run or a step without wrapping its lines, and the steps that could not be read."""
    folders = (
        {reports.steps[0].step: path}
        if is_step(path)
        else {number: step.root for number, step in find_run(path).items()}
    )
    parts = run_brief(reports.steps, folders, reports.others)
    screen.show_unwrapped(brief_markdown(parts) if markdown else brief_text(parts))
    for step, why in reports.unreadable.items():
        screen.warn(f"{step}: {why}")


class GroupedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one step, grouped by each of the given attributes."""

    step: int
    run_id: str
    by: list[Grouping]


class GroupedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope report --by ATTRIBUTE --json`."""

    format: int = 1
    steps: list[GroupedStep]
    unreadable: dict[str, str]
    """Reason why a step could not be read, by its folder."""


def report_groups(
    steps: Sequence[StepLayout], by: Sequence[str], run: str | None, *, json: bool, markdown: bool
) -> NoReturn:
    """Print the calls of these steps by attribute, and exit.

    Args:
        by: Names of the attributes.
        run: Id of the run. None for the run that captured last.

    Raises:
        CommandError: no step can be read, or no span has one of the attributes. The message names the
            attributes that spans have.
    """
    timelines, unreadable = _timelines_of(steps, run)
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
        _show_groups(grouped, markdown=markdown)
    for step, why in unreadable.items():
        screen.warn(f"{step}: {why}")
    raise typer.Exit(Exit.INCOMPLETE if unreadable else Exit.OK)


def _timelines_of(steps: Sequence[StepLayout], run: str | None) -> tuple[list[Timeline], dict[str, str]]:
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


def _show_groups(grouped: Sequence[GroupedStep], *, markdown: bool) -> None:
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


class Pages:
    """The pages that one command writes. If a folder cannot be written, only its page is lost."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        self.failed: list[str] = []
        """Path of each page that could not be written, with the reason."""

    def add_step(self, layout: StepLayout, timeline: Timeline, report: StepReport) -> None:
        self._write(layout.report, render_step(timeline, report))

    def add_run(
        self,
        layout: RunLayout,
        reports: Sequence[StepReport],
        unreadable: Mapping[str, str],
        others: Mapping[str, Sequence[int]] = {},
    ) -> None:
        """Write the page of a run, after the pages of its steps.

        Args:
            unreadable: Reason why a step could not be read, by its folder.
            others: Steps of other runs in the folder, which are left out, by the id of the run.
        """
        steps = [RunStep(report=report, href=self._href(layout, report.step)) for report in reports]
        lines = [f"{step}: {why}" for step, why in unreadable.items()]
        self._write(layout.report, render_run(steps, lines, others))

    def _href(self, layout: RunLayout, step: int) -> str | None:
        page = layout.step(step).report
        return page.relative_to(layout.root).as_posix() if page in self.written else None

    def _write(self, path: Path, page: str) -> None:
        try:
            write_atomic(path, page.encode())
        except OSError as error:
            self.failed.append(f"{path} was not written: {error.strerror or error}")
        else:
            self.written.append(path)
