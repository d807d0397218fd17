"""A timeline in parts: each machine writes that of the traces that it has, into its own folder.

A part is a whole timeline of its machine's processes, on the step's clock. Processes have the numbers that
they have in the timeline of `merge_step`. Arrows between processes of two parts are in neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.timeline.completeness import gaps
from stepscope.timeline.execution.calls import WorkerDiedError
from stepscope.timeline.execution.near import NearFiles, size_of
from stepscope.timeline.execution.workers import workers
from stepscope.timeline.merge.merge import EVERYTHING, merged, write_counters, write_spans
from stepscope.timeline.merge.merged import Merged, MergedRow, merged_row
from stepscope.timeline.merge.plan import Plan, Sources, plan_merge, read_sources
from stepscope.timeline.merge.row_parts import write_rows
from stepscope.timeline.merge.row_writer import Common, RowOutcome, RowTraces
from stepscope.timeline.merge.time_mapping import Cut
from stepscope.timeline.merge.tracks import Event, RowTracks, Tracks
from stepscope.timeline.merge.write import timeline_file
from stepscope.timeline.model import FileProblem, Timeline
from stepscope.timeline.readers.blocks import keep_memory
from stepscope.timeline.selection import Selection
from stepscope.timeline.step.load import load_step
from stepscope.timeline.step.rows import Axis, Row


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one machine, and all that it needs to write it."""

    to: Path
    jobs: int | None
    spans: str
    """JSON of the events that are of no trace, without brackets."""
    traces: list[RowTraces]
    tracks: list[RowTracks]
    """Of the row of each of `traces`."""
    pids: list[int]
    """Numbers of the timeline's rows."""
    axis: Axis
    cut: Cut
    files: int
    merged: Merged
    """As it is without its traces."""


class WrittenNode(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a part."""

    merged: Merged
    size_bytes: int


class NodeTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one machine, in the index."""

    node: str
    path: str
    """On the node."""
    size_bytes: int
    events: int
    ranks: tuple[int, ...]
    roles: tuple[str, ...]
    first_ns: int
    """From here on, unix ns on the owner's clock, its processes recorded."""
    last_ns: int


class NodeIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a step's timeline."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Of all parts, as in `Merged`."""
    window_ns: tuple[int, int]
    selection: dict[str, object]
    parts: tuple[NodeTimeline, ...]
    left_out: tuple[str, ...]
    problems: tuple[FileProblem, ...]
    incomplete: tuple[str, ...]
    """As in `Merged`."""


def merge_per_node(
    path: str | os.PathLike[str],
    executor: NearFiles,
    *,
    run_id: str | None = None,
    selection: Selection = EVERYTHING,
    to: Path | None = None,
    jobs: int | None = None,
) -> NodeIndex:
    """Have each machine write the timeline of its traces into the step's folder there, and write an index.

    Args:
        path: The step's folder, the same on all machines.
        to: Where to write the index. None: `timeline-nodes.json` in the step's folder here.
        jobs: Processes of each machine. None: one for each idle core.

    Raises:
        RecordError: no process of a capture left anything, or none of the requested run.
        ConfigError: the step has none of the selected roles.
        OSError: the index cannot be written.
    """
    layout = StepLayout(path)
    timeline = load_step(path, run_id=run_id, executor=executor)
    sources = read_sources(layout, timeline, executor)
    left_out = [
        f"{recorded.file.name}: in no node's part; merge without --per-node"
        for recorded in sources.recordings
    ]
    sources = sources._replace(recordings=[])
    plan = plan_merge(timeline, sources, selection)
    node_of, problems = _places(plan, executor)
    pending = dict[str, Future[WrittenNode]]()
    for node in dict.fromkeys(node_of.values()):
        places = {place for place, name in node_of.items() if name == node}
        task = _part(layout.timeline_of(node), timeline, sources, selection, places, jobs)
        pending[node] = executor.submit_at(node, write_node, task)
    parts, left_out = [], [*plan.left_out, *left_out]
    for node, written in _written(pending, problems):
        part = written.merged
        rows = [row for row in plan.rows if row.pid in {one.pid for one in part.rows}]
        first_ns, last_ns = _extent(rows, timeline)
        parts.append(
            NodeTimeline(
                node=node,
                path=str(layout.timeline_of(node)),
                size_bytes=written.size_bytes,
                events=part.events,
                ranks=tuple(sorted({row.rank for row in part.rows if row.rank is not None})),
                roles=tuple(dict.fromkeys(row.role for row in part.rows)),
                first_ns=first_ns,
                last_ns=last_ns,
            )
        )
        left_out += part.left_out
        problems += part.problems
    index = NodeIndex(
        step=timeline.step,
        run_id=timeline.run_id,
        base_ns=plan.common.axis.base_ns,
        window_ns=(timeline.window.start_ns, timeline.window.end_ns),
        selection=selection.words(),
        parts=tuple(parts),
        left_out=tuple(left_out),
        problems=(*plan.problems, *problems),
        incomplete=gaps(timeline),
    )
    write_atomic(to or layout.node_index, msgspec.json.format(msgspec.json.encode(index)))
    return index


def _places(plan: Plan, executor: NearFiles) -> tuple[dict[int, str], list[FileProblem]]:
    """Return the node that writes each row, by the row's place, and the traces that no node has."""
    node_of, of_host, problems = dict[int, str](), dict[str, str](), list[FileProblem]()
    for traces in plan.traces:
        row, files = traces.row, [trace.path for trace in traces.traces]
        node = executor.node_with(files, row.info.host)
        if node is None:
            what = "left out: no node has all traces of its process"
            problems += [FileProblem(file=trace.name, what=what) for trace in traces.traces]
        else:
            node_of[row.place] = of_host[row.info.host] = node
    for row in plan.rows:
        node = of_host.get(row.info.host) or executor.node_with([], row.info.host)
        if node is not None:
            node_of.setdefault(row.place, node)
    return node_of, problems


def _part(
    to: Path,
    timeline: Timeline,
    sources: Sources,
    selection: Selection,
    places: set[int],
    jobs: int | None,
) -> NodePart:
    """Return the part with the rows at these places. It has a plan of its own, as drawing changes a plan."""
    whole = plan_merge(timeline, sources, selection)
    plan = whole._replace(
        left_out=[],  # the index names it
        rows=[row for row in whole.rows if row.place in places],
        traces=[traces for traces in whole.traces if traces.row.place in places],
    )
    texts, outcome = list[bytes](), RowOutcome()

    def write(events: list[Event]) -> None:
        texts.extend(map(msgspec.json.encode, events))

    spans, counters = write_spans(plan, write, outcome), write_counters(plan, write)
    common = plan.common
    return NodePart(
        to=to,
        jobs=jobs,
        spans=b",\n".join(texts).decode(),
        traces=plan.traces,
        tracks=[common.tracks.known(traces.row) for traces in plan.traces],
        pids=common.tracks.pids,
        axis=common.axis,
        cut=common.cut,
        files=common.files,
        merged=merged(plan, spans, counters, outcome),
    )


def write_node(part: NodePart) -> WrittenNode:
    """Write a part on the machine that has its traces."""
    keep_memory()
    outcome, tracks = RowOutcome(), Tracks(part.pids)
    for traces, known in zip(part.traces, part.tracks, strict=True):
        tracks.adopt(traces.row, known)
    common = Common(part.axis, part.cut, part.files, tracks)
    size = sum(size_of(trace.path) for traces in part.traces for trace in traces.traces)
    with timeline_file(part.to, part.axis.base_ns) as out, workers(part.jobs, size) as executor:
        out.events(part.spans.encode())
        with closing(write_rows(part.traces, common, out, executor, part.to.parent)) as rows:
            for row in rows:
                outcome.add(row)
        written = _merged(part, outcome)
        out.finish(written)
    return WrittenNode(merged=written, size_bytes=part.to.stat().st_size)


def _merged(part: NodePart, outcome: RowOutcome) -> Merged:
    rows: dict[int, MergedRow] = {row.pid: row for row in part.merged.rows}
    rows.update((traces.row.pid, merged_row(traces.row)) for traces in part.traces if traces.row.shown)
    return msgspec.structs.replace(
        part.merged,
        rows=tuple(rows.values()),
        files=tuple(outcome.files),
        left_out=(*part.merged.left_out, *outcome.left_out),
        problems=tuple(outcome.problems),
    )


def _written(
    pending: Mapping[str, Future[WrittenNode]], problems: list[FileProblem]
) -> Iterator[tuple[str, WrittenNode]]:
    """Yield what each node wrote. A node that failed is a problem, and the others go on."""
    for node, future in pending.items():
        try:
            yield node, future.result()
        except (WorkerDiedError, OSError) as error:
            problems.append(FileProblem(file=f"node {node}", what=f"its part was not written: {error}"))


def _extent(rows: Sequence[Row], timeline: Timeline) -> tuple[int, int]:
    """Return from when to when the processes of these rows recorded; the step if nothing says it."""
    processes = [timeline.processes[row.process] for row in rows if row.process is not None]
    if not processes:
        return timeline.window.start_ns, timeline.window.end_ns
    return min(process.opened_ns for process in processes), max(process.last_ns for process in processes)
