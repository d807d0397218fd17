"""*Complete, or not*: reasons to doubt a report, such as missing, dropped or damaged data, calls without an
end, inexact clocks, and the cost of recording.

This file is longer than 500 lines because terminal, page and brief show its fields in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.manifest import (
    OpenedBy,
    OwnCost,
    ProcessPart,
    Recorded,
    State,
)
from stepscope.files.spans import SEQUENCE
from stepscope_report.formatting import (
    LISTED,
    count,
    duration,
    few,
    numbers,
    plain,
    say_profiled,
    starred,
    turn,
)
from stepscope_report.html import ROWS, Html, draw, section, tag
from stepscope_report.sections import Section
from stepscope_report.table import Block, Listing, Paragraph, TextTable, grouped
from stepscope_report.timeline import FileProblem, ProcessClock, Span, Timeline
from stepscope_report.timeline.model import doubts
from stepscope_report.why import say_held

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page, Sources


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A span that failed or has no end."""

    process: str
    role: str
    stage: str
    start_ns: int | None
    """Start of the span in ns after the capture opened. None if the clock of its process is unaligned."""
    wall_ns: int
    """Duration of the span. Without an end: the time until the last sign of life of its process."""
    trajectory: str | None
    turn: int | None
    error: str | None


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its spans, the alignment of its clock, and the cost of recording."""

    name: str
    host: str
    pid: int
    owner: bool
    closed: bool
    """False if the process never closed its capture."""
    spans: int
    dropped: int | None
    """Number of spans that the process dropped. None if the process died before it reported the number."""
    clock: ProcessClock
    cost: OwnCost | None
    profiled: bool = False
    """True if a profiler recorded the process."""
    died: bool = False
    """True if the process is known to have ended before it closed its capture."""


class OtherStep(msgspec.Struct, frozen=True, kw_only=True):
    """Spans that were recorded in this step but are the work of another step (asynchronous RL)."""

    step: int
    spans: int
    total_ns: int
    policy_versions: tuple[int, ...]
    under_way: int = 0
    """Number of spans that were still running when their process closed its capture, as is normal for work of
    a later step."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    state: State | None
    """State in the manifest, but `partial` instead of `ok` or `skipped` if there are doubts. None if the step
    has no manifest."""
    missing: tuple[str, ...]
    """One line with the reason for each expected part that is missing, partial, failed or pending."""
    skipped: tuple[str, ...]
    """One line with the reason for each part that was intentionally not recorded."""
    warnings: tuple[str, ...] = ()
    """One line with the reason for each part that the user probably wanted but that was not recorded."""
    notes: tuple[str, ...] = ()
    """One line for each remarkable fact that is no error, such as fewer iterations than requested."""
    uncalled: tuple[str, ...] = ()
    """Functions that `instrument` replaced, without a recorded call in any process."""
    opened_by: OpenedBy = "program"
    """`instrument` if an unedited program was instrumented, `program` if the program opens captures itself.
    Advice names only settings that the user of the program can change."""
    user_error: str | None
    """The exception of the user's code that ended the capture, or None. An exception alone does not make the
    step incomplete."""
    outside: dict[str, str] = {}
    """{name of a rank: its innermost call}, for ranks that had not entered a collective when the collective
    failed in all other ranks, for example by a timeout. Empty if a rank died or failed by itself."""
    captures: int = 1
    """Number of times that one process captured this step. The report is of the last capture."""
    recorder: Recorded | None = None
    """The event for which the flight recorder wrote the step. None if the step was captured."""
    held: str = ""
    """First line of `stepscope why` at the hang or signal for which the flight recorder wrote the step. Empty
    otherwise."""
    broken: tuple[FileProblem, ...]
    """Files that are missing or damaged. Traces are included only if the report has read them."""
    dropped: int
    """Number of spans that were dropped, in all processes that reported the number."""
    open_spans: tuple[SpanRow, ...]
    """Spans without an end: first spans of processes that never closed their capture, then other spans, and
    in both groups the longest first. Work of later steps that went on when the capture closed is in
    `other_steps` instead."""
    errors: tuple[SpanRow, ...]
    other_steps: tuple[OtherStep, ...]
    processes: tuple[ProcessRow, ...]
    lost: tuple[str, ...] = ()
    """Names of processes that died in the step and left nothing in its folder."""
    absent: tuple[str, ...] = ()
    """Names of processes that should have left something in the step's folder and did not, besides `lost`."""
    doubts: tuple[str, ...]
    """All reasons why the step is not complete; empty for a complete step."""
    complete: bool
    """True if nothing is missing, partial, failed, dropped or unaligned, and every process closed its
    capture."""


def step_health(timeline: Timeline, traces: Sequence[FileProblem] = ()) -> Health:
    """Return the health of a step.

    Args:
        traces: Problems found inside the step's traces; empty if the traces were not read.
    """
    manifest = timeline.manifest
    missing = () if manifest is None else (*manifest.problems(), *manifest.awaited())
    reasons = doubts(timeline, traces)
    state = None if manifest is None else manifest.state
    if reasons and state in ("ok", "skipped"):
        state = "partial"
    parts = () if manifest is None else manifest.processes
    here = {process.info.key for process in timeline.processes}
    dead = known_dead(timeline)
    absent = (one for part in parts for one in part.absent if one.state == "missing")
    return Health(
        state=state,
        missing=missing,
        skipped=_skipped(parts),
        warnings=() if manifest is None else tuple(manifest.warnings()),
        notes=_notes(timeline),
        uncalled=_uncalled(timeline, parts),
        opened_by="program" if manifest is None else manifest.opened_by,
        user_error=next((part.error for part in parts if part.error is not None), None),
        outside={} if dead else _outside(timeline),
        captures=timeline.captures,
        recorder=None if manifest is None else manifest.recorder,
        held=say_held(timeline.states, dead),
        broken=(*timeline.problems, *traces),
        dropped=sum(process.dropped or 0 for process in timeline.processes),
        open_spans=_rows(timeline, _never_ended(timeline)),
        errors=_rows(timeline, (span for span in timeline.spans if span.error is not None)),
        other_steps=_other_steps(timeline),
        processes=_processes(timeline),
        lost=tuple(name for key, name in dead.items() if key not in here),
        absent=tuple(one.name for one in absent if one.process not in here and one.process not in dead),
        doubts=reasons,
        complete=not reasons,
    )


def cut_processes(timeline: Timeline, *, by_a_budget: bool = False) -> frozenset[str]:
    """Return the names of the processes whose recording ended before their work did: by a budget, by SIGTERM,
    or by their exit.

    Args:
        by_a_budget: Return only the processes whose recording a budget ended.
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
    """Return True if a budget ended the recording of spans."""
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
    """Return True if `stage` (`role/stage`) is one of `labels`. A `*` in `stage` matches any text, because
    each call fills in this part of the name.
    """
    return stage in labels or ("*" in stage and any(fnmatchcase(label, stage) for label in labels))


def _never_ended(timeline: Timeline) -> list[Span]:
    ahead = set(map(id, _runs_ahead(timeline)))
    spans = [
        span
        for span in timeline.spans
        if span.end_ns is None and id(span) not in ahead and not _goes_on(timeline, span)
    ]

    def place(span: Span) -> tuple[bool, int]:
        return timeline.processes[span.process].closed_ns is not None, span.start_ns - timeline.until_ns(span)

    return sorted(spans, key=place)


def _goes_on(timeline: Timeline, span: Span) -> bool:
    """Return True if a span has no end because its process closed the capture amid work for a later step."""
    closed = timeline.processes[span.process].closed_ns is not None
    return closed and span.end_ns is None and timeline.leaves(span)


def _runs_ahead(timeline: Timeline) -> list[Span]:
    """Return the calls of trajectories that went on when their process closed its capture.

    Empty if no trajectory began before the step and ended in the step, because then nothing shows that the
    rollout runs across steps.
    """
    began_ns = timeline.window.start_ns
    is_ahead = any(
        span.stage == "trajectory" and span.end_ns is not None and span.start_ns < began_ns <= span.end_ns
        for span in timeline.spans
        if timeline.processes[span.process].aligned
    )
    return [
        span
        for span in timeline.spans
        if is_ahead
        and span.end_ns is None
        and span.trajectory is not None
        and timeline.processes[span.process].closed_ns is not None
        and not _goes_on(timeline, span)
    ]


def _notes(timeline: Timeline) -> tuple[str, ...]:
    """Return the manifest's notes, and a note on trajectories that went on when the capture closed."""
    ahead = {span.trajectory for span in _runs_ahead(timeline)}
    notes = () if timeline.manifest is None else tuple(timeline.manifest.notes())
    went_on = f"{count(len(ahead), 'trajectory')} went on when the capture closed"
    return (*notes, went_on) if ahead else notes


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


def _outside(timeline: Timeline) -> dict[str, str]:
    """Return `Health.outside`."""
    failed = {span.process for span in timeline.spans if span.error is not None and _is_collective(span)}
    open_ = grouped((span for span in timeline.spans if span.end_ns is None), lambda span: span.process)
    if not failed or any(span.error and span.process not in failed for span in timeline.spans):
        return {}
    return {
        timeline.processes[process].name: f"{spans[-1].role} {spans[-1].stage}"
        for process, spans in open_.items()
        if process not in failed and timeline.processes[process].owner
        if not any(_is_collective(span) or span.waits for span in spans)
    }


def _is_collective(span: Span) -> bool:
    return span.attrs is not None and SEQUENCE in span.attrs


def known_dead(timeline: Timeline) -> dict[str, str]:
    """Return {`ProcessInfo.key`: name} of the processes that died before they closed their capture, as their
    host, another rank or Ray reported. An engine has its name, such as `replica 0`, as the key.
    """
    parts = () if timeline.manifest is None else timeline.manifest.processes
    absent = (one for part in parts for one in part.absent if one.died)
    dead = {one.process or one.name: one.name for one in absent}
    went_on = timeline.processes[0].info.key if timeline.owner_went_on else None
    ended = (part.process for part in parts if part.died and part.process.key != went_on)
    items = (item for part in parts for item in part.expected)
    engines = {item.name: item.name for item in items if item.died and item.kind == "engine"}
    return {**dead, **engines, **{process.key: process.key for process in ended}}


def _processes(timeline: Timeline) -> tuple[ProcessRow, ...]:
    dead = known_dead(timeline)
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
            died=process.closed_ns is None and process.info.key in dead,
        )
        for process in timeline.processes
    )


NOT_COMPLETE = "Not complete"
UNCALLED = "Instrumented, without a recorded call: not called in this step, or called outside this capture"


def health_blocks(health: Health, report: StepReport) -> Iterator[Block]:
    """Yield the processes, and the reasons to doubt the report."""
    yield _processes_table(*worst_first(health.processes, 2 * LISTED))
    if health.complete and not health.errors:
        yield Paragraph(say_complete(health))
    yield from health_lists(health)


def health_lists(health: Health) -> Iterator[Listing]:
    """Yield lists of everything that is missing, without an end, failed, or of another step, with the
    reasons.
    """
    lists: tuple[tuple[str, Iterable[str]], ...] = (
        (NOT_COMPLETE, health.doubts),
        ("Never ended", map(say_span, health.open_spans)),
        ("Errors", (f"{say_span(row)}: {row.error}" for row in health.errors)),
        ("Work of other steps, recorded in this one", map(say_other, health.other_steps)),
        ("Notes on clocks", clock_notes(health)),
        ("Warnings", health.warnings),
        ("Notes", health.notes),
        (UNCALLED, health.uncalled),
        ("Not recorded, on purpose", health.skipped),
    )
    for title, lines in lists:
        if listed := tuple(lines):
            yield Listing(title, listed, bad=title == NOT_COMPLETE)


def say_other_runs(report: StepReport) -> str:
    """Return a sentence that names other runs that captured this step. Empty if there are none."""
    others = [run for run in report.runs if run != report.run_id]
    return f"Other runs captured this step too, see --run: {', '.join(others)}" if others else ""


def say_others(run_id: str | None, others: Mapping[str, Sequence[int]]) -> str:
    """Return a sentence on the steps of a folder that only other runs captured, and that are therefore left
    out.

    Args:
        run_id: The run that is shown.
        others: Steps by the id of the run that captured them.
    """
    left = "; ".join(f"step {numbers(steps)} of run {run}" for run, steps in others.items())
    return f"Only run {run_id} is shown. Left out, see --run: {left}"


OPEN_CLOSE = "open, close: time of the capture before and after the step. export: time in the background."
FIRST = "Processes with trouble come first, then the least certain clock and the slowest to open and close."


def worst_first(processes: Sequence[ProcessRow], shown: int) -> tuple[Sequence[ProcessRow], str]:
    """Return the processes, and a sentence that explains their order: first the owner, then processes with
    trouble.

    If there are at most `shown` processes, their order is unchanged, and the sentence is empty.
    """
    if len(processes) <= shown:
        return processes, ""
    vaguest = max(processes, key=lambda process: process.clock.uncertainty_ns or 0)
    others = [process for process in processes if not process.owner]
    slowest = max(others or processes, key=_profiling_ns)

    def place(process: ProcessRow) -> tuple[bool, bool, bool]:
        wrong = process.clock.uncertainty_ns is None or not process.closed or bool(process.dropped)
        return not process.owner, not wrong, process not in (vaguest, slowest)

    return sorted(processes, key=place), FIRST


def _profiling_ns(process: ProcessRow) -> int:
    return 0 if process.cost is None else process.cost.start_ns + process.cost.stop_ns


def _processes_table(processes: Sequence[ProcessRow], order: str) -> TextTable:
    columns = ("process", "host", ">spans", "clock", ">open", ">close", ">export", ">in spans")
    note = " ".join(filter(None, (order, OPEN_CLOSE, say_profiled(*(row.profiled for row in processes)))))
    rows = tuple(
        (starred(row.name, row.profiled), row.host, f"{row.spans:,}", clock(row), *cost_cells(row))
        for row in processes
    )
    return TextTable("Processes", columns, rows, note, noun="process")


def cost_cells(row: ProcessRow) -> tuple[str, ...]:
    """Return the times for opening, closing, exporting and recording spans, as text, in this order. Unknown
    times are `-`.
    """
    cost = row.cost
    times = (None,) * 4 if cost is None else (cost.start_ns, cost.stop_ns, cost.export_ns, cost.spans_ns)
    return tuple(map(duration, times))


def clock(process: ProcessRow) -> str:
    """Return as text how the process' clock was aligned with the owner's clock, and the uncertainty, if
    known.
    """
    alignment = process.clock
    if alignment.uncertainty_ns is None:
        return alignment.alignment
    how: str = alignment.alignment
    if alignment.alignment in ("measured", "collectives"):
        how = f"moved {duration(-alignment.offset_ns)}"
        how += f" by {count(alignment.matched, 'collective')}" if alignment.matched else ""
        how += f", drift {alignment.drift_ppm:+.1f} ppm" if abs(alignment.drift_ppm or 0) >= 0.05 else ""
    how += "; someone set it, so" if alignment.jumped else ","
    return f"{how} +-{duration(alignment.uncertainty_ns)}"


def clock_notes(health: Health) -> list[str]:
    """Return a line for each reason why collectives did not align a clock, and for each assumption about a
    clock.
    """
    notes: dict[str, list[str]] = {}
    for process in health.processes:
        if process.clock.note is not None:
            notes.setdefault(process.clock.note, []).append(process.name)
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


def say_complete(health: Health) -> str:
    until = "" if health.user_error is None else ", up to where the capture ended"
    but = f"; {count(len(health.warnings), 'warning')}" if health.warnings else ""
    return f"Complete: nothing is missing, dropped or broken{until}{but}."


def say_recorder(health: Health) -> str:
    """Return the sentence on a step that the flight recorder wrote. Empty for a captured step."""
    if health.recorder is None:
        return ""
    held = f"At that moment: {plain(health.held)}. " if health.held else ""
    why = f"{health.recorder.trigger}: {plain(health.recorder.reason)}"
    return f"Written by the flight recorder ({why}). {held}No profiler ran"


def say_again(health: Health) -> str:
    """Return the sentence on a step that was captured more than once. Empty for other steps."""
    return "" if health.captures == 1 else f"Captured {health.captures} times in this run; the last is shown"


def say_deaths(health: Health) -> str:
    """Return up to three processes that died in the step or left nothing in its folder, and the number of
    further ones. For a dead process, its longest known open call is named. Empty if there is no such process.
    """
    dead = [row.name for row in health.processes if row.died]
    calls = {span.process: f"{span.role} {span.stage}" for span in reversed(health.open_spans)}
    said = [f"{name} died" + (f" in {calls[name]}" if name in calls else "") for name in dead]
    said += [f"{name} died" for name in health.lost]
    fates = ["died"] * len(said) + ["left no part"] * len(health.absent)
    said += [f"{name} left no part" for name in health.absent]
    more = f"{count(len(said) - 3, 'process')} more {' or '.join(dict.fromkeys(fates[3:]))}"
    return ", ".join([*said[:3], more] if len(said) > 3 else said)


def has_deaths(health: Health) -> bool:
    """Return True if a process is known to have died in the step."""
    return bool(health.lost) or any(row.died for row in health.processes)


def was_cut_off(health: Health) -> bool:
    """Return True if the step or its recording ended before the work of the step did."""
    return health.user_error is not None or (health.recorder is not None and health.recorder.running)


def say_ended(health: Health) -> str:
    """Return the sentence that names the exception that ended the capture. Empty if none did."""
    if health.user_error is None:
        return ""
    what = "capture" if health.recorder is None else "step"
    others = [f"{name} was in {call}" for name, call in health.outside.items()]
    outside = f". {few(others, 3)}, and not in the collective that failed" if others else ""
    error = plain(health.user_error)
    if health.recorder is not None and plain(health.recorder.reason).endswith(error):
        error = error.partition(":")[0]  # `say_recorder` has its message
    return f"The {what} ended early: {error}; the report covers the time until then{outside}"


def say_incomplete(health: Health) -> str:
    """Return the first reason why the step is not complete, and the number of further reasons. Empty for a
    complete step.
    """
    reasons = health.doubts
    if not reasons:
        return ""
    more = "" if len(reasons) == 1 else f", and {count(len(reasons) - 1, 'reason')} more"
    return f"{NOT_COMPLETE}: {reasons[0]}{more}"


def say_span(row: SpanRow) -> str:
    """Return one span as text: `actor 0: actor update_actor, began at 1.20 s, 3.40 s`."""
    began = "" if row.start_ns is None else f", began at {duration(row.start_ns)}"
    whose = "" if row.trajectory is None else f", {turn(row.trajectory, row.turn)}"
    return f"{row.process}: {row.role} {row.stage}{whose}{began}, {duration(row.wall_ns)}"


def say_other(other: OtherStep) -> str:
    """Return the spans of another step as text: `step 1: 3 spans, 1.20 s in sum, policy version 4`."""
    versions = ", ".join(map(str, other.policy_versions))
    line = f"step {other.step}: {count(other.spans, 'span')}, {duration(other.total_ns)} in sum"
    line += f", policy version {versions}" if versions else ""
    return line + (f"; {other.under_way} went on when the capture closed" if other.under_way else "")


DRAWN = 256
"""Largest number of processes in the table. Each has ten cells, and browsers are slow with thousands of
cells."""


def draw_health(health: Health, page: Page) -> Iterator[Html]:
    """Yield the lists of missing and failed parts, and the table of processes."""
    complete = [tag("p", say_complete(health), class_="said good")] if health.complete else []
    yield section("complete", "Complete, or not", *complete, *map(draw, health_lists(health)))
    yield _drawn_processes(health.processes)


def _drawn_processes(processes: Sequence[ProcessRow]) -> Html:
    ordered, order = worst_first(processes, ROWS)
    if len(ordered) > DRAWN:
        order += f" {DRAWN:,} of {count(len(ordered), 'process')} are shown; --json has all."
    return section("processes", "Processes", draw(_processes_table(ordered[:DRAWN], order), "Processes"))


def _health(sources: Sources) -> Health:
    return step_health(sources.whole, () if sources.traces is None else sources.traces.problems)


HEALTH = Section(
    name="health",
    title="Complete, or not",
    compute=_health,
    terminal=health_blocks,
    html=draw_health,
)
