"""Reasons to doubt a report: missing, dropped, open or broken data, unsure clocks, the recording's cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase

import msgspec

from stepscope.files.manifest.records import OpenedBy, OwnCost, ProcessPart, Recorded, State
from stepscope_report.table import grouped
from stepscope_report.timeline import FileProblem, ProcessClock, Span, Timeline
from stepscope_report.timeline.completeness import doubts


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One span that stands out: it failed, or it never ended."""

    process: str
    role: str
    stage: str
    start_ns: int | None
    """After the capture opened. None: its process is unaligned."""
    wall_ns: int
    """Up to the last sign of life, if it never ended."""
    trajectory: str | None
    turn: int | None
    error: str | None


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process: what it left, how its clock was aligned, what being profiled cost it."""

    name: str
    host: str
    pid: int
    owner: bool
    closed: bool
    """False: it never closed its capture."""
    spans: int
    dropped: int | None
    """None: it did not live to say."""
    clock: ProcessClock
    cost: OwnCost | None
    profiled: bool = False
    """A profiler recorded it."""


class OtherStep(msgspec.Struct, frozen=True, kw_only=True):
    """Spans recorded in this step that are another step's work (asynchronous RL)."""

    step: int
    spans: int
    total_ns: int
    policy_versions: tuple[int, ...]
    under_way: int = 0
    """Number of them that went on when their process closed the capture, as work for a later step may."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    state: State | None
    """State of the manifest; `partial` if that is ok although something is missing or damaged. None if no
    process left its part.
    """
    missing: tuple[str, ...]
    """A line for each thing that was promised and is missing, partial, failed or pending, with its reason."""
    skipped: tuple[str, ...]
    """One line for each thing that was not recorded on purpose, with its reason."""
    warnings: tuple[str, ...] = ()
    """One line for each thing that was probably meant to take part and did not, with its reason."""
    notes: tuple[str, ...] = ()
    """One line for each thing to know of a recording that is no trouble: fewer iterations than asked for, an
    option that was ignored.
    """
    uncalled: tuple[str, ...] = ()
    """Functions that `instrument` replaced in some process, and of which no process recorded a call: not
    called in this step, or called in a process outside the capture.
    """
    opened_by: OpenedBy = "program"
    """Opener of the capture, by default the program's own code: advice names what its reader can change."""
    user_error: str | None
    """The user's exception that ended the capture. It alone leaves nothing incomplete."""
    captures: int = 1
    """Number of captures of the step in one process. This is of the last."""
    recorder: Recorded | None = None
    """The event upon which the flight recorder wrote the step. None: it was captured."""
    broken: tuple[FileProblem, ...]
    """Files that are missing or damaged, traces among them if they were read."""
    dropped: int
    """Spans that were not written, in all processes that lived to say so."""
    open_spans: tuple[SpanRow, ...]
    """Spans without an end: those of processes that never closed their capture first, the longest first. Work
    for a later step that goes on when its process closes is none of them: it is in `other_steps`."""
    errors: tuple[SpanRow, ...]
    other_steps: tuple[OtherStep, ...]
    processes: tuple[ProcessRow, ...]
    doubts: tuple[str, ...]
    """All reasons why the step is not complete."""
    complete: bool
    """Nothing is missing, partial, failed, dropped, broken or unaligned; every process closed its capture."""


def step_health(timeline: Timeline, traces: Sequence[FileProblem] = ()) -> Health:
    """Return the health of a step. `traces` are problems of what is in its traces, if they were read."""
    manifest = timeline.manifest
    missing = () if manifest is None else (*manifest.problems(), *manifest.awaited())
    reasons = doubts(timeline, traces)
    state = None if manifest is None else manifest.state
    if reasons and state in ("ok", "skipped"):
        state = "partial"
    parts = () if manifest is None else manifest.processes
    return Health(
        state=state,
        missing=missing,
        skipped=_skipped(parts),
        warnings=() if manifest is None else tuple(manifest.warnings()),
        notes=() if manifest is None else tuple(manifest.notes()),
        uncalled=_uncalled(timeline, parts),
        opened_by="program" if manifest is None else manifest.opened_by,
        user_error=next((part.error for part in parts if part.error is not None), None),
        captures=timeline.captures,
        recorder=None if manifest is None else manifest.recorder,
        broken=(*timeline.problems, *traces),
        dropped=sum(process.dropped or 0 for process in timeline.processes),
        open_spans=_rows(timeline, _never_ended(timeline)),
        errors=_rows(timeline, (span for span in timeline.spans if span.error is not None)),
        other_steps=_other_steps(timeline),
        processes=_processes(timeline),
        doubts=reasons,
        complete=not reasons,
    )


def cut_processes(timeline: Timeline, *, by_a_budget: bool = False) -> frozenset[str]:
    """Return the names of processes whose recording ended before their work did: by a budget, SIGTERM or
    their exit.

    Args:
        by_a_budget: By that alone.
    """
    parts = () if timeline.manifest is None else timeline.manifest.processes
    latest = {part.process.key: part for part in sorted(parts, key=lambda part: part.opened.wall_ns)}
    return frozenset(
        process.name
        for process in timeline.processes
        if (part := latest.get(process.info.key)) is not None
        and (is_truncated(part) or (not by_a_budget and part.ended_by in ("signal", "exit")))
    )


def is_truncated(part: ProcessPart) -> bool:
    """Return whether a budget ended the recording of spans."""
    return any(item.kind == "spans" and item.truncated for item in part.expected)


def _skipped(parts: Iterable[ProcessPart]) -> tuple[str, ...]:
    return tuple(
        f"{part.process.key}: {item.name}: {item.reason}"
        for part in parts
        for item in part.expected
        if item.state == "skipped" and item.kind != "selection"
    )


def _uncalled(timeline: Timeline, parts: Iterable[ProcessPart]) -> tuple[str, ...]:
    replaced = {target: stages for part in parts for target, stages in part.instrumented.items()}
    if not replaced:
        return ()
    seen = {f"{span.role}/{span.stage}" for span in (*timeline.spans, *timeline.consumed)}
    return tuple(
        f"{target} ({', '.join(dict.fromkeys(stages))})"
        for target, stages in sorted(replaced.items())
        if not any(_is_among(seen, stage) for stage in stages)
    )


def _is_among(labels: Set[str], stage: str) -> bool:
    """Return whether a `role/stage` is one of `labels`; a `*` in it stands for what a call decides."""
    return stage in labels or ("*" in stage and any(fnmatchcase(label, stage) for label in labels))


def _never_ended(timeline: Timeline) -> list[Span]:
    spans = [span for span in timeline.spans if span.end_ns is None and not _goes_on(timeline, span)]

    def place(span: Span) -> tuple[bool, int]:
        return timeline.processes[span.process].closed_ns is not None, span.start_ns - timeline.until_ns(span)

    return sorted(spans, key=place)


def _goes_on(timeline: Timeline, span: Span) -> bool:
    """Return whether a span without an end is work for a later step, of a process that closed its capture."""
    closed = timeline.processes[span.process].closed_ns is not None
    return closed and span.end_ns is None and timeline.leaves(span)


def _rows(timeline: Timeline, spans: Iterable[Span]) -> tuple[SpanRow, ...]:
    return tuple(
        SpanRow(
            process=timeline.processes[span.process].name,
            role=span.role,
            stage=span.stage,
            start_ns=timeline.since_opening_ns(span),
            wall_ns=timeline.until_ns(span) - span.start_ns,
            trajectory=span.trajectory,
            turn=span.turn,
            error=span.error,
        )
        for span in spans
    )


def _other_steps(timeline: Timeline) -> tuple[OtherStep, ...]:
    by_step = grouped((span for span in timeline.spans if span.step != timeline.step), lambda span: span.step)
    return tuple(
        OtherStep(
            step=step,
            spans=len(spans),
            total_ns=sum(span.dur_ns or 0 for span in spans),
            policy_versions=tuple(sorted({v for span in spans if (v := span.policy_version) is not None})),
            under_way=sum(_goes_on(timeline, span) for span in spans),
        )
        for step, spans in sorted(by_step.items())
    )


def _processes(timeline: Timeline) -> tuple[ProcessRow, ...]:
    return tuple(
        ProcessRow(
            name=process.name,
            host=process.info.host,
            pid=process.info.pid,
            owner=process.owner,
            closed=process.closed_ns is not None,
            spans=process.spans,
            dropped=process.dropped,
            clock=process.clock,
            cost=process.cost,
            profiled=process.profiled,
        )
        for process in timeline.processes
    )
