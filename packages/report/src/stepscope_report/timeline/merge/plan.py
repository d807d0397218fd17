"""Plan of a merged timeline: which file goes into which row, and with which numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from stepscope.errors import ConfigError
from stepscope.files.layout import StepLayout
from stepscope_report.timeline.merge.row_writer import Common, RowTrace, RowTraces
from stepscope_report.timeline.merge.step_events import Drawn
from stepscope_report.timeline.merge.time_mapping import Cut
from stepscope_report.timeline.merge.tracks import Tracks
from stepscope_report.timeline.model import FileProblem, Timeline
from stepscope_report.timeline.readers.chrome import ChromeTrace, TraceFields
from stepscope_report.timeline.selection import Selection
from stepscope_report.timeline.step.recorded import Recorded
from stepscope_report.timeline.step.rows import Row, Rows, axis_of
from stepscope_report.timeline.step.traces import StepFiles, TraceFile, find_traces

NOT_SELECTED = "of another role or rank"


class Sources(NamedTuple):
    """Traces of a step's folder, with the facts that a merge needs before it places any."""

    chrome: list[tuple[TraceFile, TraceFields]]
    recordings: list[Recorded]
    """Files of other formats."""
    unread: list[str]
    problems: list[FileProblem]


class Recording(NamedTuple):
    """A file that a reader turns into events, and the rows in which they are wanted."""

    recorded: Recorded
    rows: dict[int | None, Row]
    number: int
    """The number of the file among all traces, which is the prefix of its ids."""


class Plan(NamedTuple):
    """Contents of one timeline, in the order in which they are written.

    Writing numbers the tracks and marks rows as shown, so a plan is written once.
    """

    timeline: Timeline
    selection: Selection
    rows: list[Row]
    """All rows, from top to bottom."""
    drawn: Drawn
    traces: list[RowTraces]
    recordings: list[Recording]
    common: Common
    left_out: list[str]
    problems: list[FileProblem]


def read_sources(layout: StepLayout, timeline: Timeline) -> Sources:
    """Find the traces of a step and read the beginning of each."""
    files = find_traces(layout, timeline.run_id, timeline.earlier_files)
    return sources_of(files._replace(problems=[]))  # the timeline has those


def sources_of(files: StepFiles) -> Sources:
    """Read the beginning of each trace."""
    chrome = [(trace, ChromeTrace(trace.path).fields()) for trace in files.traces if trace.reader is None]
    recordings = [
        Recorded(trace.reader, trace.found_file, trace.role)
        for trace in files.traces
        if trace.reader is not None
    ]
    return Sources(chrome, recordings, list(files.unread), list(files.problems))


def plan_merge(timeline: Timeline, sources: Sources, selection: Selection) -> Plan:
    """Return the plan of a step's timeline. Reads and writes no file.

    Raises:
        ConfigError: the step has none of the selected roles.
    """
    axis = axis_of(timeline, [fields.base_ns or 0 for _, fields in sources.chrome])
    rows = Rows(timeline, axis)
    traces = [(trace, fields, rows.of_chrome(trace, fields)) for trace, fields in sources.chrome]
    for recorded in sources.recordings:
        recorded.place(rows)
    order = rows.number()
    _check_roles(timeline, order, selection)
    limits = selection.limits_ns(timeline.window.start_ns)
    start, end = (None if ns is None else ns - axis.base_ns for ns in limits)
    highest = len(order) + len(sources.chrome) + len(sources.recordings)
    common = Common(axis, Cut(start, end), highest, Tracks(row.pid for row in order))
    numbers = count(len(order) + 1)
    left_out = list(sources.unread)
    return Plan(
        timeline=timeline,
        selection=selection,
        rows=order,
        drawn=Drawn(timeline, rows, axis, selection, common.cut),
        traces=_selected_traces(traces, order, selection, numbers, left_out),
        recordings=_selected_recordings(sources, selection, numbers, left_out),
        common=common,
        left_out=left_out,
        problems=[*timeline.problems, *sources.problems],
    )


def _check_roles(timeline: Timeline, rows: Iterable[Row], selection: Selection) -> None:
    roles = {row.info.role for row in rows} | {span.role for span in timeline.spans}
    if selection.roles is not None and roles and not selection.role(*roles):
        allowed = f"names and globs of the step's roles: {', '.join(sorted(roles))}"
        raise ConfigError("roles", ",".join(selection.roles), allowed, "ask for one of these")


def _selected_traces(
    traces: list[tuple[TraceFile, TraceFields, Row]],
    order: list[Row],
    selection: Selection,
    numbers: Iterator[int],
    left_out: list[str],
) -> list[RowTraces]:
    """Return the wanted traces by row, in the order of the rows."""
    chosen = dict[int, list[RowTrace]]()
    firsts = set[int]()
    for trace, fields, row in traces:
        # A row's first trace has the row's number: a late file of another process leaves the others' numbers.
        number = next(numbers) if row.place in firsts else row.place
        firsts.add(row.place)
        if _is_wanted(trace.role, row, selection):
            row_trace = RowTrace(trace.path, trace.name, number, fields.base_ns)
            chosen.setdefault(row.place, []).append(row_trace)
        else:
            left_out.append(f"{trace.name}: {NOT_SELECTED}")
    return [RowTraces(row, tuple(chosen[row.place])) for row in order if row.place in chosen]


def _selected_recordings(
    sources: Sources, selection: Selection, numbers: Iterator[int], left_out: list[str]
) -> list[Recording]:
    recordings = []
    for recorded in sources.recordings:
        rows = {pid: row for pid, row in recorded.rows.items() if _is_wanted(recorded.role, row, selection)}
        number = next(numbers) if rows else 0
        recordings.append(Recording(recorded, rows, number))
        if len(rows) < len(recorded.rows):
            left_out.append(f"{recorded.file.name}: {'' if not rows else 'what is '}{NOT_SELECTED}")
    return recordings


def _is_wanted(role: str, row: Row, selection: Selection) -> bool:
    return selection.role(role, row.info.role) and selection.rank(row.info.rank)
