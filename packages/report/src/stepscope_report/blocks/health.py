"""Reasons to doubt a step's report, as tables and lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepscope_report.blocks.block import Block, Listing, Paragraph, TextTable
from stepscope_report.formatting import LISTED, count, duration, numbers, plain, say_profiled, starred, turn
from stepscope_report.model import StepReport
from stepscope_report.tables.health import Health, OtherStep, ProcessRow, SpanRow

NOT_COMPLETE = "Not complete"
UNCALLED = "Instrumented, without a recorded call: not called in this step, or called outside this capture"


def health_blocks(health: Health, report: StepReport) -> Iterator[Block]:
    """Yield the processes, and the reasons to doubt the numbers above."""
    yield _processes(health.processes)
    if health.complete and not health.errors:
        yield Paragraph(say_complete(health))
    yield from health_lists(health)


def health_lists(health: Health) -> Iterator[Listing]:
    """Yield what is missing, open, failed or foreign, each with its reason."""
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
    """Name the other runs that captured this step; empty without any."""
    others = [run for run in report.runs if run != report.run_id]
    return f"Other runs captured this step too, see --run: {', '.join(others)}" if others else ""


def say_others(run_id: str | None, others: Mapping[str, Sequence[int]]) -> str:
    """Name the steps of a folder that are left out because other runs alone captured them.

    Args:
        run_id: The run that is shown.
        others: {id of another run: those of its steps}.
    """
    left = "; ".join(f"step {numbers(steps)} of run {run}" for run, steps in others.items())
    return f"Only run {run_id} is shown. Left out, see --run: {left}"


OPEN_CLOSE = "open, close: the capture took this before and after the step. export: in the background."
FIRST = "First the processes with trouble, then the least sure clock and the one that took longest to record."


def worst_first(processes: Sequence[ProcessRow], shown: int) -> tuple[Sequence[ProcessRow], str]:
    """Return the processes so that the first `shown` ones say most, and a note on that order.

    Processes that are all shown stay in their order, without a note.
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


def _processes(processes: Sequence[ProcessRow]) -> TextTable:
    ordered, order = worst_first(processes, 2 * LISTED)
    columns = ("process", "host", ">spans", "clock", ">open", ">close", ">export", ">in spans")
    note = " ".join(filter(None, (order, OPEN_CLOSE, say_profiled(*(row.profiled for row in processes)))))
    rows = tuple(
        (starred(row.name, row.profiled), row.host, f"{row.spans:,}", clock(row), *cost_cells(row))
        for row in ordered
    )
    return TextTable("Processes", columns, rows, note, noun="process")


def cost_cells(row: ProcessRow) -> tuple[str, ...]:
    """Return the cost of opening, closing, exporting, and of spans."""
    cost = row.cost
    times = (None,) * 4 if cost is None else (cost.start_ns, cost.stop_ns, cost.export_ns, cost.spans_ns)
    return tuple(map(duration, times))


def clock(process: ProcessRow) -> str:
    """Describe how its times got onto the owner's clock, with the uncertainty."""
    alignment = process.clock
    if alignment.uncertainty_ns is None:
        return alignment.alignment
    how: str = alignment.alignment
    if alignment.alignment in ("measured", "collectives"):
        how = f"moved {duration(-alignment.offset_ns)}"
        how += f" by {count(alignment.matched, 'collective')}" if alignment.matched else ""
        how += f", drift {alignment.drift_ppm:+.1f} ppm" if abs(alignment.drift_ppm or 0) >= 0.05 else ""
    return f"{how}, +-{duration(alignment.uncertainty_ns)}{', was set' if alignment.jumped else ''}"


def clock_notes(health: Health) -> list[str]:
    """Return a line for each reason why collectives align no clock, and for each assumption about one."""
    notes: dict[str, list[str]] = {}
    for process in health.processes:
        if process.clock.note is not None:
            notes.setdefault(process.clock.note, []).append(process.name)
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


def say_complete(health: Health) -> str:
    until = "" if health.user_error is None else ", up to where the capture ended"
    but = f"; {count(len(health.warnings), 'warning')} below" if health.warnings else ""
    return f"Complete: nothing is missing, dropped or broken{until}{but}."


def say_recorder(health: Health) -> str:
    """Return the sentence on a step that the flight recorder wrote. Empty for a captured one."""
    if health.recorder is None:
        return ""
    return (
        f"Written by the flight recorder ({health.recorder.trigger}: {plain(health.recorder.reason)}). "
        "It holds spans alone: no profiler ran"
    )


def say_again(health: Health) -> str:
    """Return the sentence on a step that was tried again. Empty for others."""
    return "" if health.captures == 1 else f"Captured {health.captures} times in this run; the last is shown"


def say_ended(health: Health) -> str:
    """Name the exception that ended the capture. Empty if none did: that alone leaves nothing incomplete."""
    if health.user_error is None:
        return ""
    what = "capture" if health.recorder is None else "step"
    return f"The {what} ended with {plain(health.user_error)}: what follows is up to there"


def say_incomplete(health: Health) -> str:
    """Return the first reason why the step is not complete, and the number of others. Empty if it is."""
    reasons = health.doubts
    if not reasons:
        return ""
    more = "" if len(reasons) == 1 else f", and {count(len(reasons) - 1, 'reason')} more"
    return f"{NOT_COMPLETE}: {reasons[0]}{more}"


def say_span(row: SpanRow) -> str:
    """Return `actor 0: actor update_actor, began at 1.20 s, 3.40 s`."""
    began = "" if row.start_ns is None else f", began at {duration(row.start_ns)}"
    whose = "" if row.trajectory is None else f", {turn(row.trajectory, row.turn)}"
    return f"{row.process}: {row.role} {row.stage}{whose}{began}, {duration(row.wall_ns)}"


def say_other(other: OtherStep) -> str:
    """Return `step 1: 3 spans, 1.20 s in sum, policy version 4`."""
    versions = ", ".join(map(str, other.policy_versions))
    line = f"step {other.step}: {count(other.spans, 'span')}, {duration(other.total_ns)} in sum"
    line += f", policy version {versions}" if versions else ""
    return line + (f"; {other.under_way} went on when the capture closed" if other.under_way else "")
