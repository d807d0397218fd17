"""Traces that stepscope did not write, as an object."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope_report.brief import Briefed, Part
from stepscope_report.plain import Plain, PlainReport
from stepscope_report.table import Rows, Table
from stepscope_report.timeline.step.plain import read_plain


class OpenTraces(Briefed):
    """Traces of torch.profiler or of engines. They are read when first needed.

    Attributes:
        path: Their folder, or one file.
        tables: Names of their tables.
    """

    tables = ("operators", "devices", "engines", "stragglers", "memory", "traces", "processes")

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<stepscope traces {self.path}>"

    @cached_property
    def _plain(self) -> Plain:
        return Plain(read_plain([self.path]))

    def report(self) -> PlainReport:
        """Return all tables, as `stepscope report --json` prints them.

        Raises:
            RecordError: no trace holds an event.
        """
        return self._plain.to_json()

    def to_html(self) -> str:
        """Return the report as a page that links to no file."""
        return self._plain.to_html()

    def table(self, name: str) -> Rows:
        """Return the rows of a table as dicts; times are integers, in ns.

        Args:
            name: One of `tables`.

        Raises:
            ValueError: there is no such table.
        """
        if name not in self.tables:
            raise ValueError(f"table is {name!r}; use one of {', '.join(self.tables)}")
        report = self.report()
        rows: dict[str, Sequence[Any]] = {"engines": report.engines, "processes": report.processes}
        if name not in rows:
            rows[name] = () if report.traces is None else getattr(report.traces, name)
        return Rows(Table(rows[name]).to_dicts())

    def _parts(self) -> Sequence[Part]:
        return self._plain.brief([self.path])
