"""Report and comparison of traces that stepscope did not write. Such reports have only sections that need no
spans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from stepscope_report.advice import Advice
from stepscope_report.advice.trace_evidence import TraceEvidence
from stepscope_report.advice.traces import trace_advice
from stepscope_report.brief import Part, engine_lines
from stepscope_report.diff import Change, Diff, Figures, Side
from stepscope_report.formatting import count, duration, few, moment
from stepscope_report.gate import STEP, GateSteps
from stepscope_report.html import Colours, draw_section, page, tag
from stepscope_report.model import StepReport
from stepscope_report.report import step_report
from stepscope_report.sections import Page, Section
from stepscope_report.sections.advice import advice_blocks, draw_advice, savings
from stepscope_report.sections.collectives import COLLECTIVES, CollectiveRow
from stepscope_report.sections.engines import ENGINES, Engine
from stepscope_report.sections.gaps import GAPS, GapRow, causes_of_gaps, where
from stepscope_report.sections.health import ProcessRow, clock_notes
from stepscope_report.sections.labels import LABELS, LabelRow
from stepscope_report.sections.profiler_steps import ProfilerStepRow
from stepscope_report.sections.throughput import THROUGHPUT, Throughput
from stepscope_report.sections.traces import (
    TRACES,
    TraceTables,
    device_lines,
    marks_of,
    on_device,
    on_host,
    say_problem,
    short,
)
from stepscope_report.table import Block, Listing, TextTable
from stepscope_report.timeline.activity.nesting import STEP_LABEL
from stepscope_report.timeline.activity.traces import Traces, place_traces
from stepscope_report.timeline.clocks import is_wall
from stepscope_report.timeline.plain import PlainStep
from stepscope_report.timeline.rows import names_of

_SECTIONS: tuple[Section[Any], ...] = (GAPS, LABELS, COLLECTIVES, ENGINES, THROUGHPUT, TRACES)
_ADVICE, _DEVICES, _CAUSES, _OPERATORS, _MARKS, _TROUBLE = 2, 4, 3, 2, 2, 5
"""Largest number of lines of each kind in a brief."""
LEFT_OUT = (
    "Left out, because traces have no spans of stepscope: where the step went, calls, idle processes, "
    "long tail, staleness."
)


class PlainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of traces without spans, as `--json` prints it. Times are in ns."""

    format: int = 1
    name: str
    """Name of the folder that holds all traces."""
    opened_ns: int
    window_ns: int
    """Time in ns from the first to the last event of all processes, on one clock."""
    advice: tuple[Advice, ...]
    """Advice: first alarms, then hints by possible saving, the largest first."""
    processes: tuple[ProcessRow, ...]
    engines: tuple[Engine, ...]
    throughput: Throughput | None
    gaps: tuple[GapRow, ...]
    labels: tuple[LabelRow, ...]
    collectives: tuple[CollectiveRow, ...]
    traces: TraceTables | None
    left_out: str = LEFT_OUT


def _longest(traces: TraceTables) -> Iterator[str]:
    """Yield the operators and kernels with the longest self time, first of devices, then of hosts."""
    rows = sorted((row for row in traces.operators if row.kind != "sync"), key=lambda row: -row.self_ns)
    for row in (*on_device(rows)[:_OPERATORS], *on_host(rows)[:_OPERATORS], *marks_of(rows)[:_MARKS]):
        role = f"{row.role} " if len({other.role for other in rows}) > 1 else ""
        yield f"{role}{short(row.name)} ({row.kind}): {duration(row.self_ns)} in {count(row.count, 'call')}"


def _idle(rows: Sequence[GapRow]) -> Iterator[str]:
    """Yield the causes of idle time with the most time, over all roles."""
    causes = sorted(causes_of_gaps(rows), key=lambda cause: -cause.total_ns)
    roles = {cause.role for cause in causes}
    for cause in causes[:_CAUSES]:
        role = f"{cause.role}: " if len(roles) > 1 else ""
        place = f", in {where(cause)}" if where(cause) else ""
        yield f"{role}{cause.kind}: {duration(cause.total_ns)} in {count(cause.gaps, 'gap')}{place}"


def _alone(traces: Traces) -> Traces:
    """Return the traces. If all of them are in one file, no process is marked as unaligned, because the file
    has one clock.
    """
    if len({one.file for one in traces.activities}) != 1:
        return traces
    activities = (
        msgspec.structs.replace(one, name=name, unaligned=None)
        for one, name in zip(
            traces.activities, names_of([one.info for one in traces.activities]), strict=True
        )
    )
    return msgspec.structs.replace(traces, activities=tuple(activities))


class Plain:
    """A report of traces and its drawings."""

    def __init__(self, step: PlainStep) -> None:
        self._timeline = step.timeline
        traces = _alone(place_traces(step.files, step.contents, step.timeline))
        self._activities = traces.activities
        self._report: StepReport = step_report(step.timeline, traces)
        tables = self._report.traces
        self._advice = (
            ()
            if tables is None
            else trace_advice(
                TraceEvidence(
                    gaps=self._report.gaps,
                    labels=self._report.labels,
                    traces=tables,
                    activities=traces.activities,
                )
            )
        )

    @property
    def steps(self) -> Sequence[ProfilerStepRow]:
        """Return the steps of all processes. Empty if no trace has steps."""
        return () if self._report.traces is None else self._report.traces.steps

    def labels(self) -> dict[int, dict[str, float]]:
        """Return {number of a step: {label with the labels around it: ns on the CPU}}, summed over the
        processes, without the labels of steps themselves.
        """
        sums = defaultdict[int, dict[str, float]](lambda: defaultdict(float))
        for label in chain.from_iterable(activity.content.labels for activity in self._activities):
            name = " / ".join(part for part in label.path if part != STEP_LABEL)
            for number, us in label.steps.items() if name else ():
                sums[number][name] += us * 1000
        return sums

    def names(self) -> str:
        """Return the names of the ranges with the most time as one text, for a message."""
        rows = sorted(self._report.labels, key=lambda row: -row.cpu_ns)
        return few(list(dict.fromkeys(row.path[-1] for row in rows)), 8) or "there is none"

    @property
    def complete(self) -> bool:
        """True if every trace was read in full and all traces are on one clock."""
        traces = self._report.traces
        return not (traces is None or traces.problems or self._unaligned())

    @property
    def title(self) -> str:
        return f"Traces in {self._timeline.run_id}"

    def head(self) -> list[str]:
        return [f"{self.title}, {self._extent()}", LEFT_OUT]

    def _extent(self) -> str:
        window = self._timeline.window
        rows = () if self._report.traces is None else self._report.traces.traces
        processes = count(len({row.process for row in rows}), "process")
        span = f"{duration(window.wall_ns)} from the first event to the last"
        when = moment(window.start_ns) if is_wall(window.start_ns) else "at no known time"
        return f"{when}: {processes}, {span}" if window.wall_ns else f"{when}: {processes}"

    def brief(self, paths: Sequence[Path], options: Mapping[str, str | None] = {}) -> list[Part]:
        """Return the brief, in at most 40 lines. The commands to run next get `paths` as arguments, and the
        next report gets the options of this one.

        Args:
            options: {option: its value, or None if it is not given}.
        """
        traces, engines = self._report.traces, tuple(engine_lines(self._report.engines))
        named = " ".join(quote(str(path)) for path in paths)
        given = "".join(f" {name} {quote(value)}" for name, value in options.items() if value is not None)
        parts = [
            Part(self.title, (self._extent(), LEFT_OUT)),
            Part("What to fix first", tuple(self._first())),
            Part("Devices", () if traces is None else tuple(device_lines(traces.devices, _DEVICES))),
            Part("Why the devices were idle", tuple(_idle(self._report.gaps))),
            Part("Operators and kernels", () if traces is None else tuple(_longest(traces))),
            Part("Engines", engines),
            Part("Trouble", tuple(islice(self._trouble(), _TROUBLE))),
            Part(
                "Next",
                (
                    f"stepscope report {named}{given} -o report.html",
                    f"stepscope merge {named} -o timeline.json.gz",
                ),
            ),
        ]
        return [part.on_one_line() for part in parts if part.lines]

    def _first(self) -> Iterator[str]:
        for advice in self._advice[:_ADVICE]:
            saves = savings(advice, self._timeline.window.wall_ns)
            yield f"{advice.what}{f' (at most {saves})' if saves else ''} [{advice.rule}]"
            yield f"  {'; '.join(advice.because)}"
            yield f"  Try: {advice.do}"
        if rest := self._advice[_ADVICE:]:
            yield f"{len(rest)} more: {', '.join(advice.rule for advice in rest)}"
        if not self._advice:
            yield "No rule of advice applies"

    def _trouble(self) -> Iterator[str]:
        traces = self._report.traces
        if traces is not None:
            yield from map(say_problem, traces.problems)
        yield from (*clock_notes(self._report.health), *self._unaligned())

    def blocks(self) -> Iterator[Block]:
        yield from advice_blocks(self._advice, self._report, of="recording")
        for section in _SECTIONS:
            yield from section.blocks_of(self._report)
        yield from self._files()
        yield from self._clocks()

    def _files(self) -> Iterator[Block]:
        """Yield a table with the files of each process, since processes may differ only in their files."""
        traces = self._report.traces
        if traces is not None and len(traces.traces) > 1:
            said = {
                "step": ["" if row.step is None else f"{row.step}" for row in traces.traces],
                "stage": [row.stage or "" for row in traces.traces],
            }
            known = {name: cells for name, cells in said.items() if any(cells)}
            rows = tuple(
                (row.process, row.file, *more, f"{row.events:,}", duration(row.recorded_ns))
                for row, *more in zip(traces.traces, *known.values(), strict=True)
            )
            yield TextTable("Files", ("process", "file", *known, ">events", ">recorded"), rows, noun="file")

    def _clocks(self) -> Iterator[Block]:
        if notes := (*clock_notes(self._report.health), *self._unaligned()):
            yield Listing("Notes on clocks", notes)

    def _unaligned(self) -> list[str]:
        rows = () if self._report.traces is None else self._report.traces.traces
        return [f"{row.file}: unaligned, {row.unaligned}" for row in rows if row.unaligned is not None]

    def to_json(self) -> PlainReport:
        report, window = self._report, self._timeline.window
        return PlainReport(
            name=self._timeline.run_id,
            opened_ns=window.start_ns,
            window_ns=window.wall_ns,
            advice=self._advice,
            processes=report.health.processes,
            engines=report.engines,
            throughput=report.throughput,
            gaps=report.gaps,
            labels=report.labels,
            collectives=report.collectives,
            traces=report.traces,
        )

    def to_html(self) -> str:
        """Return the page, which links to no file."""
        drawn = Page(self._timeline, self._report, Colours([], []))
        notes = (tag("p", sentence, class_="note") for sentence in (self._extent(), LEFT_OUT))
        header = tag("header", tag("h1", self.title), *notes)
        advice = draw_advice(self._advice, drawn)
        sections = [part for section in _SECTIONS for part in section.html_of(drawn)]
        files = draw_section("files", "Files", self._files())
        clocks = draw_section("clocks", "Notes on clocks", self._clocks())
        return page(self.title, header, *advice, *sections, *files, *clocks)


# The parts of a step, which are compared between two recordings. Computation and copies, exposed
# communication, and each cause of idle time add up to the step. Without a device, the step has one part.
# Phases such as forward and backward overlap these parts. A gate can limit them, but the account has no lines
# for them.

_COMPUTES = "computation and copies"
_EXPOSED = "exposed communication"
_ON_HOST = "not on a device"
_BESIDE: dict[str, Callable[[ProfilerStepRow], int | None]] = {
    "data loading": lambda row: row.loading_ns,
    "host to device": lambda row: row.h2d_ns,
    "forward": lambda row: row.forward_ns,
    "backward": lambda row: row.backward_ns,
    "optimizer": lambda row: row.optimizer_ns,
}


class PlainSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one recording. Times are means over the processes that recorded a step."""

    name: str
    parts: Mapping[int, Mapping[str, float]]
    """{number of the step: {part: ns}}. The parts of a step add up to it."""
    beside: Mapping[int, Mapping[str, float]]
    """{number of the step: {name: ns}} of times that overlap the parts."""
    labels: Mapping[int, Mapping[str, float]]
    """{number of the step: {label with the labels around it: ns on the CPU}}."""
    complete: bool

    @property
    def took(self) -> dict[int, float]:
        return {number: sum(parts.values()) for number, parts in self.parts.items()}

    def gate(self) -> GateSteps:
        """Return the steps as the gate compares them, in seconds."""
        captured = [
            {STEP: self.took[number] / 1e9}
            | {name: ns / 1e9 for name, ns in (*parts.items(), *self.beside[number].items())}
            for number, parts in self.parts.items()
        ]
        return GateSteps(whole=False, captured=captured)


def plain_steps(name: str, report: Plain, wanted: Callable[[int], bool]) -> PlainSteps:
    """Return the wanted steps, by number. `parts` is empty if no step is wanted."""
    by_number: dict[int, list[ProfilerStepRow]] = defaultdict(list)
    labels = report.labels()
    for row in report.steps:
        if wanted(row.step):
            by_number[row.step].append(row)
    return PlainSteps(
        name=name,
        parts={number: _mean(map(_parts, own), len(own)) for number, own in sorted(by_number.items())},
        beside={number: _mean(map(_beside, own), len(own)) for number, own in by_number.items()},
        labels={number: _mean(iter([labels[number]]), len(own)) for number, own in by_number.items()},
        complete=report.complete,
    )


def _mean(of_rows: Iterator[Mapping[str, float]], number: int) -> dict[str, float]:
    sums = Counter[str]()
    for parts in of_rows:
        for name, ns in parts.items():
            sums[name] += ns  # type: ignore[assignment]  # a Counter holds any number
    return {name: ns / number for name, ns in sums.items()}


def _parts(row: ProfilerStepRow) -> dict[str, float]:
    if row.busy_ns is None or row.idle_ns is None:
        return {_ON_HOST: row.dur_ns}
    exposed_ns = row.exposed_ns or 0
    # `gaps` adds up the gaps of all devices. `idle_ns` is the time in which all devices were idle at once.
    share = row.idle_ns / max(1, sum(row.gaps.values()))
    idle = {f"idle: {kind}": ns * share for kind, ns in row.gaps.items()}
    known_ns = sum(idle.values())
    parts = {_COMPUTES: float(row.busy_ns - exposed_ns), _EXPOSED: float(exposed_ns), **idle}
    return parts | ({"idle": row.idle_ns - known_ns} if row.idle_ns - known_ns > 1 else {})


def _beside(row: ProfilerStepRow) -> dict[str, float]:
    return {name: float(ns) for name, of in _BESIDE.items() if (ns := of(row)) is not None}


def plain_diff(a: PlainSteps, b: PlainSteps) -> Diff:
    """Return the change of each part, the largest change first, whatever its sign."""
    names = dict.fromkeys(name for side in (a, b) for parts in side.parts.values() for name in parts)
    parts = a.parts.values(), b.parts.values()
    changes = [_change(name, "host" if name == _ON_HOST else "device", *parts) for name in names]
    changes.sort(key=lambda change: (-abs(change.delta_ns), change.stage or ""))
    sides = _side(a), _side(b)
    labels = dict.fromkeys(name for side in (a, b) for times in side.labels.values() for name in times)
    named = [_change(name, "label", a.labels.values(), b.labels.values()) for name in labels]
    beside = a.beside.values(), b.beside.values()
    known = {name for side in beside for times in side for name, ns in times.items() if ns}
    return Diff(
        a=sides[0],
        b=sides[1],
        delta_ns=sides[1].step_ns - sides[0].step_ns,
        changes=tuple(changes),
        phases=tuple(_change(name, "phase", *beside) for name in _BESIDE if name in known),
        labels=tuple(sorted(named, key=lambda change: (-abs(change.delta_ns), change.stage or ""))),
    )


def _side(steps: PlainSteps) -> Side:
    took = list(steps.took.values())
    return Side(
        steps=tuple(steps.parts),
        runs=(steps.name,),
        step_ns=round(sum(took) / len(took)),
        opening_ns=0,
        closing_ns=0,
        complete=steps.complete,
    )


def _change(
    name: str, role: str, a: Iterable[Mapping[str, float]], b: Iterable[Mapping[str, float]]
) -> Change:
    """Return the change of the time `name`. `a` and `b` contain, for each step, the times by name."""
    one, other = ([times.get(name, 0.0) for times in side] for side in (a, b))
    figures = _figures(one), _figures(other)
    apart = len(one) > 1 and len(other) > 1 and (max(one) < min(other) or max(other) < min(one))
    return Change(
        kind="stage",
        role=role,
        stage=name,
        a=figures[0],
        b=figures[1],
        delta_ns=figures[1].wall_ns - figures[0].wall_ns,
        apart=apart,
    )


def _figures(values: Sequence[float]) -> Figures:
    mean = sum(values) / len(values)
    return Figures(wall_ns=round(mean), min_ns=round(min(values)), max_ns=round(max(values)))
