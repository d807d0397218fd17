"""Reasons to doubt a page: missing data with the reason, the processes, and the files behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

import msgspec

from stepscope.report.formatting import duration, size
from stepscope.report.html.markup import Html, tag
from stepscope.report.html.page import ROWS, listing, section, table
from stepscope.report.tables.health import Health, ProcessRow
from stepscope.report.terminal.health import (
    OPEN_CLOSE,
    UNCALLED,
    clock,
    clock_notes,
    doubts,
    say_complete,
    say_other,
    say_span,
    worst_first,
)
from stepscope.report.terminal.sections import say_profiled, starred


class StepFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a step, or a folder of its files, for a page to point to."""

    path: str
    """Relative to the page, with `/` between its parts."""
    what: str
    """A description for people."""
    bytes: int


def health(found: Health) -> Html:
    """List what is missing, partial, failed, open or broken, each with its reason."""
    return section("complete", "Complete, or not", *_lists(found))


def _lists(found: Health) -> Iterator[Html]:
    reasons = list(doubts(found))
    if found.complete:
        yield tag("p", say_complete(found), class_="said good")
    if reasons:
        yield listing("Not complete", reasons, "bad")
    if found.open_spans:
        yield listing("Never ended", [say_span(row) for row in found.open_spans])
    if found.errors:
        yield listing("Errors", [f"{say_span(row)}: {row.error}" for row in found.errors])
    if found.other_steps:
        yield listing("Work of other steps, recorded in this one", [say_other(o) for o in found.other_steps])
    if notes := clock_notes(found):
        yield listing("Collectives that align no clock", notes)
    if found.warnings:
        yield listing("Warnings", found.warnings)
    if found.notes:
        yield listing("Notes", found.notes)
    if found.uncalled:
        yield listing(UNCALLED, found.uncalled)
    if found.skipped:
        yield listing("Not recorded, on purpose", found.skipped)


def processes(rows: Sequence[ProcessRow]) -> Html:
    """Each process: spans, clock, and what being profiled cost it."""
    columns = (
        "process", "host", ">pid", ">spans", ">dropped", "clock", ">open", ">close", ">export", ">in spans",
    )  # fmt: skip
    note = (
        f"clock: how its times got onto the owner's clock; the true position is within +- this. {OPEN_CLOSE} "
        "in spans: inside the stages' time."
    )
    note = f"{note} {say_profiled(*(row.profiled for row in rows))}".rstrip()
    ordered, first = worst_first(rows, ROWS)
    shown = table(columns, [_process(row) for row in ordered])
    return section("processes", "Processes", shown, note=f"{first} {note}" if first else note)


def _process(row: ProcessRow) -> tuple[str | Html, ...]:
    cost = row.cost
    times = (None,) * 4 if cost is None else (cost.start_ns, cost.stop_ns, cost.export_ns, cost.spans_ns)
    starry = starred(row.name, row.profiled)
    name: str | Html = tag("b", starry, " (owner)") if row.owner else starry
    dropped = "-" if row.dropped is None else str(row.dropped or "")
    spans = f"{row.spans:,}" if row.closed else f"{row.spans:,}, never closed"
    return (name, row.host, str(row.pid), spans, dropped, clock(row), *map(duration, times))


def files(found: Sequence[StepFile]) -> Html:
    """Links to the step's files, relative, so that a copied folder keeps them."""
    rows = [(_link(file.path), file.what, size(file.bytes)) for file in found]
    note = "Spans and traces are this page's sources; stepscope report --json prints all tables."
    return section("files", "Files", table(("file", "what", ">size"), rows), note=note)


def _link(path: str) -> Html:
    # "./" first: a name like `javascript:x` is a path then, and no scheme.
    return tag("a", path, href="./" + quote(path))
