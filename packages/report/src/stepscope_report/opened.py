"""Captured runs and steps as objects, for notebooks and scripts. Files are read when they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.run import steps_of_run
from stepscope.files.values import AttrValue
from stepscope_report.advice import Advice
from stepscope_report.brief import Briefed, Part, read_first, run_brief
from stepscope_report.formatting import numbers
from stepscope_report.model import StepReport
from stepscope_report.near import Neighbours
from stepscope_report.plain import Plain, PlainReport
from stepscope_report.report import step_report
from stepscope_report.sections.breakdown import Line
from stepscope_report.sections.counters import CounterRow
from stepscope_report.sections.engines import Engine
from stepscope_report.sections.health import ProcessRow
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.long_tail import SlowTrajectory, Spread
from stepscope_report.sections.requests import Request
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.traces import DeviceRow, OperatorRow
from stepscope_report.table import Rows, Table
from stepscope_report.timeline import Timeline, load_step, load_traces
from stepscope_report.timeline.plain import has_traces, is_ours, read_plain


class OpenTraces(Briefed):
    """Traces of torch.profiler or of engines. Their files are read when they are needed.

    Attributes:
        path: The folder of the traces, or one file.
        tables: Names of the tables that `table` returns.
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
        """Return all tables, as `stepscope report --json` prints them. They are computed once.

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


class _Span(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    role: str
    stage: str
    start_ns: int | None
    dur_ns: int | None
    of_step: int | None
    trajectory: str | None
    turn: int | None
    error: str | None
    cancelled: bool
    attrs: dict[str, AttrValue]


ROWS: Mapping[str, type[msgspec.Struct]] = {
    "advice": Advice,
    "breakdown": Line,
    "stages": Stage,
    "idle": Idle,
    "trajectories": SlowTrajectory,
    "spreads": Spread,
    "engines": Engine,
    "requests": Request,
    "operators": OperatorRow,
    "devices": DeviceRow,
    "counters": CounterRow,
    "processes": ProcessRow,
    "spans": _Span,
}
"""{table: type of its rows}."""


class OpenStep(Briefed):
    """A captured step.

    Attributes:
        folder: The folder of the step.
        tables: Names of the tables that `table` returns.
    """

    tables = tuple(ROWS)

    def __init__(self, folder: Path, *, run: str | None = None, traces: bool = True) -> None:
        self.folder = folder
        self._run, self._traces = run, traces

    def __repr__(self) -> str:
        return f"<stepscope step {self.folder}>"

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of all processes on one clock.

        Raises:
            RecordError: nothing of the step can be read.
        """
        return load_step(self.folder, run_id=self._run)

    @cached_property
    def _report(self) -> StepReport:
        near = Neighbours().of(self.folder, self.timeline)
        if not self._traces:
            return step_report(self.timeline, near=near)
        return step_report(self.timeline, load_traces(self.folder, self.timeline), near)

    def report(self) -> StepReport:
        """Return all tables of the step. They are computed once.

        Raises:
            RecordError: nothing of the step can be read.
        """
        return self._report

    def table(self, name: str) -> Rows:
        """Return the rows of a table as dicts; times are integers, in ns.

        Args:
            name: One of `tables`.

        Raises:
            ValueError: there is no such table.
        """
        if name == "spans":
            return Rows(Table(_spans(self.timeline)).to_dicts())
        values = _values(self.report())
        if name not in values:
            raise ValueError(f"table is {name!r}; use one of {', '.join(self.tables)}")
        return Rows(Table(values[name]).to_dicts())

    def _parts(self) -> Sequence[Part]:
        report = self.report()
        return run_brief([report], {report.step: self.folder})


class OpenRun(Briefed):
    """A run with its captured steps: `run[3]` is step 3.

    Attributes:
        folder: The folder of the run.
        steps: {number: captured step}.
        others: {id of another run in the folder: its steps that are left out}.
    """

    def __init__(
        self, folder: Path, steps: Mapping[int, OpenStep], others: Mapping[str, Sequence[int]] = {}
    ) -> None:
        self.folder = folder
        self.steps = dict(steps)
        self.others = dict(others)

    def __repr__(self) -> str:
        left = "".join(
            f"; left out: step {numbers(steps)} of run {run}" for run, steps in self.others.items()
        )
        return f"<stepscope run {self.folder}: steps {', '.join(map(str, self.steps))}{left}>"

    def __getitem__(self, step: int) -> OpenStep:
        if step not in self.steps:
            runs = [run for run, steps in self.others.items() if step in steps]
            fix = f"; open(..., run={runs[0]!r}) has it" if runs else ""
            raise KeyError(f"no step {step} was captured; captured: {', '.join(map(str, self.steps))}{fix}")
        return self.steps[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def report(self) -> list[StepReport]:
        """Return the report of each step that can be read.

        Raises:
            RecordError: no step can be read.
        """
        return [step.report() for step in self._readable().values()]

    def table(self, name: str) -> Rows:
        """Return the rows of a table for all steps that can be read. Each row begins with `step`, the step's
        number.

        Args:
            name: One of `OpenStep.tables`.

        Raises:
            ValueError: there is no such table.
            RecordError: no step can be read.
        """
        tables = {number: step.table(name) for number, step in self._readable().items()}
        return Rows({"step": number, **row} for number, rows in tables.items() for row in rows)

    def read_first(self) -> OpenStep:
        """Return the step that failed, or else the longest step, among the steps that can be read.

        Raises:
            RecordError: no step can be read.
        """
        return self.steps[read_first(self.report())[0].step]

    def _readable(self) -> dict[int, OpenStep]:
        readable, reasons = {}, []
        for number, step in self.steps.items():
            try:
                step.report()
            except RecordError as error:
                reasons.append(str(error))
            else:
                readable[number] = step
        if not readable:
            raise RecordError("\n".join(reasons))
        return readable

    def _parts(self) -> Sequence[Part]:
        folders = {number: step.folder for number, step in self.steps.items()}
        return run_brief(self.report(), folders, self.others)


def open(  # noqa: A001  # read as `stepscope_report.open`
    path: str | os.PathLike[str], *, run: str | None = None, traces: bool = True
) -> OpenRun | OpenStep | OpenTraces:
    """Open the folder of a run (its `save_path`), the folder of one step, or traces that other tools wrote.

        run = stepscope_report.open("/data/profile")
        run[3].table("stages").to_pandas()  # times are integers, in ns

    In a notebook, the returned object shows the brief of the step, or of a run's `read_first()`.

    Args:
        path: The folder, or one trace file that another tool wrote.
        run: The id of the run to open if several runs wrote into the folder, or None for the run that
            captured last.
        traces: True if reports read the profilers' traces, which may be large.

    Raises:
        RecordError: the folder does not exist, holds neither a captured step nor a trace, or holds no step of
            `run`.
    """
    folder = Path(path)
    if StepLayout(folder).is_step:
        return OpenStep(folder, run=run, traces=traces)
    steps = RunLayout(folder).steps()
    if not steps:
        if not is_ours(folder) and has_traces(folder):
            return OpenTraces(folder)
        why = "holds no captured step" if folder.exists() else "does not exist"
        raise RecordError(f"{folder} {why}. Give the folder of a run (save_path), or of one step in it")
    chosen = steps_of_run(steps, run)
    if run is not None and not chosen.opened_ns:
        raise RecordError(f"{folder} holds nothing of run {run!r}; it holds: {', '.join(chosen.others)}")
    opened = {n: OpenStep(step.root, run=chosen.run_id, traces=traces) for n, step in chosen.steps.items()}
    return OpenRun(folder, opened, chosen.others)


def _values(report: StepReport) -> dict[str, Sequence[Any]]:
    """Return the rows of each table of a report. The rows of a table that the step lacks are
    empty.
    """
    tail, traces, counters = report.long_tail, report.traces, report.counters
    return {
        "advice": report.advice,
        "breakdown": report.breakdown.lines,
        "stages": report.stages,
        "idle": report.idle,
        "trajectories": () if tail is None else tail.worst,
        "spreads": () if tail is None else tail.spreads,
        "engines": report.engines,
        "requests": report.requests,
        "operators": () if traces is None else traces.operators,
        "devices": () if traces is None else traces.devices,
        "counters": () if counters is None else counters.rows,
        "processes": report.health.processes,
    }


def _spans(timeline: Timeline) -> Iterator[_Span]:
    for span in timeline.spans:
        yield _Span(
            process=timeline.processes[span.process].name,
            role=span.role,
            stage=span.stage,
            start_ns=timeline.since_opening_ns(span),
            dur_ns=span.dur_ns,
            of_step=span.step,
            trajectory=span.trajectory,
            turn=span.turn,
            error=span.error,
            cancelled=span.cancelled,
            attrs=span.attrs or {},
        )
