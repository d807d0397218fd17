"""*Critical path*: the calls that the step waited for at each moment, by stage, and the time that each stage
could save. Waits in vain: time in which a process waited while no process did work that could end the wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.spans import SEQUENCE
from stepscope_report.accounting import Label, bits_of, walk
from stepscope_report.charts import Mark
from stepscope_report.division import NOT_KNOWN, WAITING, work_of
from stepscope_report.formatting import duration, percents, turn
from stepscope_report.html import Html, section, stacked, table
from stepscope_report.sections import OVERVIEW, Section
from stepscope_report.spans import MOVES_WEIGHTS, ROLLOUT, is_tool, label_of
from stepscope_report.suspects import StepPath, step_path
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Span, Timeline
from stepscope_report.timeline.critical_path import Piece, PieceKind, Replay
from stepscope_report.timeline.step_graph import NOBODY, StepGraph

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page

LEAST = 100
"""A stage's saving is computed if its calls have at least 1 / `LEAST` of the step on the path."""
ROWS = 16
"""Number of rows of the table in a terminal, and number of stages whose saving is computed."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path within one call. Segments follow each other without gaps."""

    since_ns: int
    """Start of the segment in ns after the start of the step."""
    wall_ns: int
    kind: PieceKind
    process: str
    role: str | None
    """Role of the call. `role` and `stage` are None if no call ran."""
    stage: str | None
    trajectory: str | None = None
    turn: int | None = None


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A stage with its own time on the path, as a part of another stage or of a group."""

    role: str
    stage: str
    wall_ns: int


class PathStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage on the critical path."""

    role: str | None
    stage: str | None
    kind: PieceKind
    wall_ns: int
    """Time on the path in calls of the stage, without the calls inside them. The rows add up to the step."""
    inside_ns: int
    """Time on the path in calls of the stage, including the calls inside them."""
    saves_ns: int | None
    """Time by which the step would be shorter if the stage's calls and all calls inside them took no time.
    All other calls keep their duration and order. None for a stage with less than 1 / `LEAST` of the step on
    the path, for stages after the first `ROWS`, and if it is not known what the step waited for."""
    process: str
    """Name of the process with most of `wall_ns`."""
    trajectory: str | None
    """Trajectory of the stage's longest segment; `turn` is the turn of that segment. None if the segment has
    no trajectory."""
    turn: int | None
    parts: tuple[PathPart, ...]
    """Stages of the calls that ran inside this stage's calls on the path, the longest own time first."""


class PathGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of several stages on the path, with the calls inside them."""

    wall_ns: int
    saves_ns: int
    """Time by which the step would be shorter if the calls of this group took no time."""
    parts: tuple[PathPart, ...]
    """Stages of the group, the longest own time first. The own times add up to `wall_ns`."""


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path of a step: at each moment the call that the step waited for."""

    not_known_ns: int
    """Time for which the recording does not show what the step waited for."""
    stages: Table[PathStage]
    """The stages on the path, the longest own time first."""
    weights: PathGroup | None
    """The calls that move weights. None if none is on the path."""
    tools_save_ns: int | None = None
    """Upper bound of the time by which the step would be shorter if tools, and waits inside trajectories,
    took no time. Waits are included because they may be waits for tools of other trajectories. None if the
    step has no calls of tools, or if the replay contains no such call."""
    queues_save_ns: int | None = None
    """Upper bound of the time by which the step would be shorter without the waits of role `rollout`. None if
    the replay contains no such wait."""
    segments: Table[Segment]
    """The segments of the path from the start of the step to its end."""


def step_critical_path(timeline: Timeline) -> CriticalPath:
    """Return the critical path of a step."""
    return path_of(step_path(timeline))


def path_of(path: StepPath) -> CriticalPath:
    graph, pieces, replay = path
    return CriticalPath(
        not_known_ns=sum(piece.wall_ns for piece in pieces if piece.kind == "not known"),
        stages=_stages(graph, pieces, replay),
        weights=_weights(graph, pieces, replay),
        tools_save_ns=_without(path, lambda span: is_tool(span.role, span.stage), waits=True),
        queues_save_ns=_without(path, lambda span: span.waits and span.role == "rollout"),
        segments=Table(_segment(graph, piece) for piece in pieces),
    )


def _without(path: StepPath, counts: Callable[[Span], bool], *, waits: bool = False) -> int | None:
    spans, replay = path.graph.spans, path.replay
    nodes = [node for node, span in enumerate(spans) if counts(span)]
    if not any(map(replay.has, nodes)):
        return None
    also = (
        {label_of(span) for span in spans if span.waits and span.trajectory is not None} if waits else set()
    )
    return replay.saves_ns({label_of(spans[node]) for node in nodes} | also)


def _segment(graph: StepGraph, piece: Piece) -> Segment:
    span, timeline = graph.span_of(piece.node), graph.timeline
    return Segment(
        since_ns=piece.start_ns - timeline.window.start_ns,
        wall_ns=piece.wall_ns,
        kind=piece.kind,
        process=timeline.processes[graph.process_of(piece.node)].name,
        role=None if span is None else span.role,
        stage=None if span is None else span.stage,
        trajectory=None if span is None else span.trajectory,
        turn=None if span is None else span.turn,
    )


def _weights(graph: StepGraph, pieces: Sequence[Piece], replay: Replay) -> PathGroup | None:
    labels = {label_of(span) for span in graph.spans if not span.waits}
    moving = {label for label in labels if MOVES_WEIGHTS.search(label[1])}
    own_ns = Counter[Label]()
    for piece in pieces:
        own = _label(graph, piece)
        if own is not None and not moving.isdisjoint(_around(graph, piece.node)):
            own_ns[own] += piece.wall_ns
    if not own_ns:
        return None
    return PathGroup(wall_ns=own_ns.total(), saves_ns=replay.saves_ns(moving), parts=_parts(own_ns))


def _parts(own_ns: Counter[Label]) -> tuple[PathPart, ...]:
    return tuple(PathPart(role=role, stage=stage, wall_ns=ns) for (role, stage), ns in own_ns.most_common())


def _stages(graph: StepGraph, pieces: Sequence[Piece], replay: Replay) -> Table[PathStage]:
    rows = grouped(pieces, lambda piece: (_label(graph, piece), piece.kind))
    below = _below(graph, pieces)
    longest = sorted(below, key=lambda label: (-below[label].total(), label))[:ROWS]
    least_ns = graph.timeline.window.wall_ns // LEAST
    saves = {label: replay.saves_ns([label]) for label in longest if below[label].total() >= least_ns}
    stages = [_stage(graph, label, kind, own, below, saves) for (label, kind), own in rows.items()]
    return Table(sorted(stages, key=lambda row: (-row.wall_ns, row.role or "", row.stage or "", row.kind)))


def _stage(
    graph: StepGraph,
    label: Label | None,
    kind: PieceKind,
    pieces: Sequence[Piece],
    below: dict[Label, Counter[Label]],
    saves: dict[Label, int],
) -> PathStage:
    processes = Counter[int]()
    for piece in pieces:
        processes[graph.process_of(piece.node)] += piece.wall_ns
    longest = _segment(graph, max(pieces, key=lambda piece: piece.wall_ns))
    own_ns = sum(piece.wall_ns for piece in pieces)
    known = label is not None and kind != "not known"
    parts = below[label] if label is not None and known else Counter[Label]()
    return PathStage(
        role=longest.role,
        stage=longest.stage,
        kind=kind,
        wall_ns=own_ns,
        inside_ns=parts.total() if known else own_ns,
        saves_ns=saves.get(label) if label is not None and known else None,
        process=graph.timeline.processes[processes.most_common(1)[0][0]].name,
        trajectory=longest.trajectory,
        turn=longest.turn,
        parts=_parts(Counter({below: ns for below, ns in parts.items() if below != label})),
    )


def _label(graph: StepGraph, piece: Piece) -> Label | None:
    span = graph.span_of(piece.node)
    return None if span is None else label_of(span)


def _below(graph: StepGraph, pieces: Sequence[Piece]) -> dict[Label, Counter[Label]]:
    """Return {stage: {stage of calls inside, or the stage itself: own time of these calls on the path}}."""
    below: dict[Label, Counter[Label]] = defaultdict(Counter)
    for piece in pieces:
        own = _label(graph, piece)
        if own is not None:
            for label in _around(graph, piece.node):
                below[label][own] += piece.wall_ns
    return below


def _around(graph: StepGraph, node: int) -> set[Label]:
    """Return the stages of a call and of all calls around it."""
    labels = set()
    while node != NOBODY and (span := graph.span_of(node)) is not None:
        labels.add(label_of(span))
        node = graph.caller[node]
    return labels


def path_marks(path: CriticalPath) -> list[Mark]:
    """Return the segments of the path, in order of time, as marks of a chart."""
    return [
        Mark(
            NOT_KNOWN if one.kind == "not known" else (one.role or "", one.stage or ""),
            one.since_ns,
            one.since_ns + one.wall_ns,
        )
        for one in path.segments
    ]


_COLUMNS = ("stage", ">on the path", ">%", ">with below", ">could save", "process", "longest in")
_NOTE = (
    "What the step waited for at each moment; the column adds up to the step. could save: how much shorter "
    "the step would be if these calls, and those inside them, took no time."
)


def path_blocks(path: CriticalPath, report: StepReport) -> Iterator[Block]:
    if not path.segments:
        return
    rows = _rows(path, report.breakdown.window_ns)
    yield TextTable("Critical path", _COLUMNS, tuple(rows), _note(path), noun="stage")


def _rows(path: CriticalPath, window_ns: int) -> list[tuple[str, ...]]:
    shares = percents([row.wall_ns for row in path.stages], window_ns)
    return [
        (
            say_stage(row),
            duration(row.wall_ns),
            share,
            "" if row.inside_ns == row.wall_ns else duration(row.inside_ns),
            "" if row.saves_ns is None else duration(row.saves_ns),
            row.process,
            "" if row.trajectory is None else turn(row.trajectory, row.turn),
        )
        for row, share in zip(path.stages, shares, strict=True)
    ]


def say_stage(row: PathStage) -> str:
    """Return the name of a row: `rollout decode`, `rollout queue (waiting)`, or `not known, in trainer
    update`.
    """
    if row.stage is None:
        return "not known, in no call"
    name = f"{row.role} {row.stage}"
    if row.kind == "not known":
        return f"not known, in {name}"
    return f"{name} (waiting)" if row.kind == "wait" else name


def _note(path: CriticalPath) -> str:
    if path.not_known_ns * 100 < sum(row.wall_ns for row in path.stages):
        return _NOTE
    return f"{_NOTE} Not known: no recorded call explains these {duration(path.not_known_ns)}."


def draw_path(path: CriticalPath, page: Page) -> Iterator[Html]:
    """Yield the critical path as a bar, and its table."""
    window_ns = page.report.breakdown.window_ns
    if not path.segments or not window_ns:
        return
    parts = (
        (
            page.colours.of(NOT_KNOWN if row.kind == "not known" else (row.role or "", row.stage or "")),
            row.wall_ns,
            f"{say_stage(row)} {duration(row.wall_ns)}",
        )
        for row in path.stages
    )
    rows = _rows(path, window_ns)
    yield section(
        "critical-path", "Critical path", stacked(parts, window_ns), table(_COLUMNS, rows), note=_note(path)
    )


CRITICAL_PATH = Section(
    name="critical_path",
    title="Critical path",
    compute=lambda sources: path_of(sources.path),
    terminal=path_blocks,
    html=draw_path,
    page=OVERVIEW,
)


class VainWait(msgspec.Struct, frozen=True, kw_only=True):
    """The waits in vain of one stage, over the step."""

    role: str
    stage: str
    processes: tuple[str, ...]
    """Names of the processes that waited in this stage."""
    wall_ns: int
    """Time in which at least one process of `processes` waited in this stage, in ns."""
    vain_ns: int
    """Part of `wall_ns` in which no process did work that could end the wait. Only work of rollout roles can
    end a wait of a rollout role; any work can end other waits."""


def waits_in_vain(timeline: Timeline) -> Table[VainWait]:
    """Return the waits that were partly in vain, the longest vain time first.

    A wait is left out if no role that could end the wait recorded work in this step. Collectives are left
    out, because they wait for their last rank. Empty if the clock of a process is unaligned, because that
    process may have worked.
    """
    waiters: dict[Label, dict[str, None]] = defaultdict(dict)
    for span in timeline.spans:
        if span.waits and SEQUENCE not in (span.attrs or {}):
            waiters[label_of(span)][timeline.processes[span.process].name] = None
    if not waiters or not all(process.aligned for process in timeline.processes):
        return Table()
    working = {span.role for span in timeline.spans if not span.waits}
    wall_ns, vain_ns = _waits_ns(timeline)
    return Table(
        VainWait(
            role=label[0],
            stage=label[1],
            processes=tuple(waiters[label]),
            wall_ns=wall_ns[label],
            vain_ns=vain_ns[label],
        )
        for label, _ in vain_ns.most_common()
        if label in waiters and _could_end(label, working)
    )


def _waits_ns(timeline: Timeline) -> tuple[Counter[Label], Counter[Label]]:
    """Return {stage: ns} twice: the time of each waiting stage, and the part of that time in vain."""
    work, window = work_of(timeline, range(len(timeline.spans))), timeline.window
    wall_ns, vain_ns = Counter[Label](), Counter[Label]()
    for start_ns, end_ns, mask in walk(work.intervals, window.start_ns, window.end_ns):
        bits = bits_of(mask)
        busy = {work.labels[bit][0] for bit in bits if work.tiers[bit] != WAITING}
        for label in {work.labels[bit] for bit in bits if work.tiers[bit] == WAITING}:
            wall_ns[label] += end_ns - start_ns
            if not _could_end(label, busy):
                vain_ns[label] += end_ns - start_ns
    return wall_ns, vain_ns


def _could_end(wait: Label, roles: Iterable[str]) -> bool:
    """Return True if work of one of `roles` could end a wait of the stage `wait`."""
    return any(role in ROLLOUT or wait[0] not in ROLLOUT for role in roles)


VAIN_WAITS = Section(name="vain_waits", compute=lambda sources: waits_in_vain(sources.timeline))
