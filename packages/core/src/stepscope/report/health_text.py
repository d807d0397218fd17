"""How far a step's report can be trusted, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from stepscope.report.figures import count, duration, turn
from stepscope.report.health import Health, OtherStep, ProcessRow, SpanRow
from stepscope.report.tables import LISTED, listing, table


def trust(health: Health) -> Iterator[RenderableType]:
    """What says how far the numbers above can be trusted."""
    yield _processes(health.processes)
    if health.complete and not health.errors:
        yield Text("\nComplete: nothing is missing, dropped or broken.")
    doubts = [*health.missing, *_doubts(health)]
    if doubts:
        yield listing("Not complete", doubts)
    if health.open_spans:
        yield listing("Never ended", [_row(row) for row in health.open_spans])
    if health.errors:
        yield listing("Errors", [f"{_row(row)}: {row.error}" for row in health.errors])
    if health.other_steps:
        yield listing(
            "Work of other steps, recorded in this one", [_other(step) for step in health.other_steps]
        )
    if health.skipped:
        yield listing("Not recorded, on purpose", health.skipped)


def _processes(processes: Sequence[ProcessRow]) -> RenderableType:
    rows = [
        (
            process.name, process.host, f"{process.spans:,}", _clock(process),
            *(("-",) * 4 if process.cost is None else map(duration, (
                process.cost.start_ns, process.cost.stop_ns, process.cost.export_ns, process.cost.spans_ns,
            ))),
        )
        for process in processes[:2 * LISTED]
    ]  # fmt: skip
    note = (
        "open and close: what profiling cost; the owner's are the line `profiler`. export: in the background."
    )
    if len(processes) > len(rows):
        note = f"{count(len(processes) - len(rows), 'process')} more in --json. {note}"
    columns = ("process", "host", ">spans", "clock", ">open", ">close", ">export", ">in spans")
    return table("Processes", columns, rows, note)


def _clock(process: ProcessRow) -> str:
    clock = process.clock
    if clock.uncertainty_ns is None:
        return "unaligned"
    how = f"moved {duration(-clock.offset_ns)}" if clock.alignment == "measured" else clock.alignment
    return f"{how}, +-{duration(clock.uncertainty_ns)}{', was set' if clock.jumped else ''}"


def _doubts(health: Health) -> Iterator[str]:
    if health.state is None:
        yield "no process left its part of the manifest"
    if health.user_error is not None:
        yield f"the capture ended with {health.user_error}"
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


def _row(row: SpanRow) -> str:
    began = "" if row.start_ns is None else f", began at {duration(row.start_ns)}"
    whose = "" if row.trajectory is None else f", {turn(row.trajectory, row.turn)}"
    return f"{row.process}: {row.role} {row.stage}{whose}{began}, {duration(row.wall_ns)}"


def _other(other: OtherStep) -> str:
    versions = ", ".join(map(str, other.policy_versions))
    said = f"step {other.step}: {count(other.spans, 'span')}, {duration(other.total_ns)} in sum"
    return said + (f", policy version {versions}" if versions else "")
