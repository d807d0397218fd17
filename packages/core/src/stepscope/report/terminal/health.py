"""Reasons to doubt a step's report, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from stepscope.report.formatting import count, duration, plain, turn
from stepscope.report.tables.health import Health, OtherStep, ProcessRow, SpanRow
from stepscope.report.terminal.layout import LISTED, listing, table
from stepscope.report.terminal.sections import say_profiled, starred

UNCALLED = "Instrumented, and no call recorded: not called in this step, or in a process outside this capture"


def trust(health: Health) -> Iterator[RenderableType]:
    """Yield the reasons to doubt the numbers above."""
    yield _processes(health.processes)
    if health.complete and not health.errors:
        yield Text(f"\n{say_complete(health)}")
    found = list(doubts(health))
    if found:
        yield listing("Not complete", found)
    if health.open_spans:
        yield listing("Never ended", [say_span(row) for row in health.open_spans])
    if health.errors:
        yield listing("Errors", [f"{say_span(row)}: {row.error}" for row in health.errors])
    if health.other_steps:
        yield listing(
            "Work of other steps, recorded in this one", [say_other(step) for step in health.other_steps]
        )
    if notes := clock_notes(health):
        yield listing("Collectives that align no clock", notes)
    if health.warnings:
        yield listing("Warnings", health.warnings)
    if health.notes:
        yield listing("Notes", health.notes)
    if health.uncalled:
        yield listing(UNCALLED, health.uncalled)
    if health.skipped:
        yield listing("Not recorded, on purpose", health.skipped)


OPEN_CLOSE = "open, close: the capture took this before and after the step. export: in the background."
FIRST = "First those that something is wrong with, then the least sure clock, and who took longest to record."


def worst_first(processes: Sequence[ProcessRow], shown: int) -> tuple[Sequence[ProcessRow], str]:
    """In an order in which the first `shown` ones say most, and what is to be said of that. As they are where
    all are shown.
    """
    if len(processes) <= shown:
        return processes, ""
    vaguest = max(processes, key=lambda process: process.clock.uncertainty_ns or 0)
    others = [process for process in processes if not process.owner]
    slowest = max(others or processes, key=lambda process: _profiling_ns(process))

    def place(process: ProcessRow) -> tuple[bool, bool, bool]:
        wrong = process.clock.uncertainty_ns is None or not process.closed or bool(process.dropped)
        return not process.owner, not wrong, process not in (vaguest, slowest)

    return sorted(processes, key=place), FIRST


def _profiling_ns(process: ProcessRow) -> int:
    return 0 if process.cost is None else process.cost.start_ns + process.cost.stop_ns


def _processes(processes: Sequence[ProcessRow]) -> RenderableType:
    ordered, first = worst_first(processes, 2 * LISTED)
    rows = [
        (
            starred(process.name, process.profiled), process.host, f"{process.spans:,}", clock(process),
            *(("-",) * 4 if process.cost is None else map(duration, (
                process.cost.start_ns, process.cost.stop_ns, process.cost.export_ns, process.cost.spans_ns,
            ))),
        )
        for process in ordered[:2 * LISTED]
    ]  # fmt: skip
    note = OPEN_CLOSE
    if len(processes) > len(rows):
        note = f"{count(len(processes) - len(rows), 'process')} more in --json. {first} {note}"
    note = f"{note} {say_profiled(*(process.profiled for process in processes))}".rstrip()
    columns = ("process", "host", ">spans", "clock", ">open", ">close", ">export", ">in spans")
    return table("Processes", columns, rows, note)


def clock(process: ProcessRow) -> str:
    """Describe how its times got onto the owner's clock, with the uncertainty."""
    found = process.clock
    if found.uncertainty_ns is None:
        return "unaligned"
    how: str = found.alignment
    if found.alignment in ("measured", "collectives"):
        how = f"moved {duration(-found.offset_ns)}"
        how += f" by {count(found.matched, 'collective')}" if found.matched else ""
        how += f", drift {found.drift_ppm:+.1f} ppm" if abs(found.drift_ppm or 0) >= 0.05 else ""
    return f"{how}, +-{duration(found.uncertainty_ns)}{', was set' if found.jumped else ''}"


def clock_notes(health: Health) -> list[str]:
    """Why collectives say nothing of some clock, though there were some: a line for each reason."""
    notes: dict[str, list[str]] = {}
    for process in health.processes:
        if process.clock.note is not None:
            notes.setdefault(process.clock.note, []).append(process.name)
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


def say_complete(health: Health) -> str:
    """Of a complete step."""
    until = "" if health.user_error is None else ", up to where the capture ended"
    but = f"; {count(len(health.warnings), 'warning')} below" if health.warnings else ""
    return f"Complete: nothing is missing, dropped or broken{until}{but}."


def say_again(health: Health) -> str:
    """Of a step that was tried again. Empty of others."""
    return "" if health.captures == 1 else f"Captured {health.captures} times in this run; the last is shown"


def say_ended(health: Health) -> str:
    """Name the exception that ended the capture. Empty if none did: that alone leaves nothing incomplete."""
    if health.user_error is None:
        return ""
    return f"The capture ended with {plain(health.user_error)}: what follows is up to there"


def say_incomplete(health: Health) -> str:
    """The first reason why the step is not complete, and how many more there are. Empty where it is."""
    reasons = [] if health.complete else list(doubts(health))
    if not reasons:
        return ""
    more = "" if len(reasons) == 1 else f", and {count(len(reasons) - 1, 'reason')} more"
    return f"Not complete: {reasons[0]}{more}"


def doubts(health: Health) -> Iterator[str]:
    """Why the step is not complete, a line for each reason. None where it is."""
    reasons = list(_reasons(health))
    if not (reasons or health.complete):
        reasons.append("the process that opened the capture left nothing")
    yield from reasons


def _reasons(health: Health) -> Iterator[str]:
    yield from health.missing
    if health.state is None:
        yield "no process left its part of the manifest"
    for process in health.processes:
        if not process.closed:
            yield f"{process.name} never closed its capture: killed, or still running"
        if process.dropped:
            yield f"{process.name} dropped {count(process.dropped, 'span')}: so times are too short"
        if process.clock.alignment == "unaligned":
            yield f"{process.name} is on another host, its clock unmeasured: its spans are in no wall time"
    for problem in health.broken:
        lines = "" if problem.lines is None else f" ({count(problem.lines, 'line')})"
        yield f"{problem.file}: {problem.what}{lines}"


def say_span(row: SpanRow) -> str:
    """`actor 0: actor update_policy, began at 1.20 s, 3.40 s`."""
    began = "" if row.start_ns is None else f", began at {duration(row.start_ns)}"
    whose = "" if row.trajectory is None else f", {turn(row.trajectory, row.turn)}"
    return f"{row.process}: {row.role} {row.stage}{whose}{began}, {duration(row.wall_ns)}"


def say_other(other: OtherStep) -> str:
    """`step 1: 3 spans, 1.20 s in sum, policy version 4`."""
    versions = ", ".join(map(str, other.policy_versions))
    said = f"step {other.step}: {count(other.spans, 'span')}, {duration(other.total_ns)} in sum"
    said += f", policy version {versions}" if versions else ""
    return said + (f"; {other.under_way} went on when the capture closed" if other.under_way else "")
