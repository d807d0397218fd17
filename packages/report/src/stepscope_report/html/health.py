"""Reasons to doubt a page: missing data with the reason, the processes, and the files behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from stepscope_report.blocks.health import (
    OPEN_CLOSE,
    clock,
    cost_cells,
    health_lists,
    say_complete,
    worst_first,
)
from stepscope_report.formatting import count, say_profiled, size, starred
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import ROWS, draw, section, table
from stepscope_report.section import Page, StepFile
from stepscope_report.tables.health import Health, ProcessRow

LISTED = 256
"""Processes in the table. Each is ten cells, and a browser opens thousands of cells slowly."""


def draw_health(health: Health, page: Page) -> Iterator[Html]:
    """Yield what is missing or broken, the processes, and links to the step's files."""
    complete = [tag("p", say_complete(health), class_="said good")] if health.complete else []
    yield section("complete", "Complete, or not", *complete, *map(draw, health_lists(health)))
    yield _processes(health.processes)
    if page.files:
        yield _files(page.files)


def _processes(rows: Sequence[ProcessRow]) -> Html:
    columns = (
        "process", "host", ">pid", ">spans", ">dropped", "clock", ">open", ">close", ">export", ">in spans",
    )  # fmt: skip
    note = (
        f"clock: how its times got onto the owner's clock; the true position is within +- this. {OPEN_CLOSE} "
        "in spans: inside the stages' time."
    )
    note = f"{note} {say_profiled(*(row.profiled for row in rows))}".rstrip()
    ordered, order = worst_first(rows, ROWS)
    if len(ordered) > LISTED:
        order += f" {LISTED:,} of {count(len(ordered), 'process')} are shown; --json has all."
    shown = table(columns, [_process(row) for row in ordered[:LISTED]])
    return section("processes", "Processes", shown, note=f"{order} {note}" if order else note)


def _process(row: ProcessRow) -> tuple[str | Html, ...]:
    starry = starred(row.name, row.profiled)
    name: str | Html = tag("b", starry, " (owner)") if row.owner else starry
    dropped = "-" if row.dropped is None else str(row.dropped or "")
    spans = f"{row.spans:,}" if row.closed else f"{row.spans:,}, never closed"
    return (name, row.host, str(row.pid), spans, dropped, clock(row), *cost_cells(row))


def _files(files: Sequence[StepFile]) -> Html:
    """Return links to the step's files, relative, so that a copied folder keeps them."""
    rows = [(_link(file.path), file.what, size(file.bytes)) for file in files]
    note = "Spans and traces are this page's sources; stepscope report --json prints all tables."
    return section("files", "Files", table(("file", "what", ">size"), rows), note=note)


def _link(path: str) -> Html:
    # "./" first: a name like `javascript:x` is a path then, and no scheme.
    return tag("a", path, href="./" + quote(path))
