"""The brief of a step: the report in at most 40 lines of text, Markdown or HTML.

All figures are taken from the report. This module only chooses the lines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from shlex import quote

import msgspec

from stepscope_report.advice import Advice
from stepscope_report.formatting import count, duration, moment, percent_of, percents, plain
from stepscope_report.model import StepReport
from stepscope_report.sections.advice import savings, say_change
from stepscope_report.sections.baseline import say_beside, say_usual
from stepscope_report.sections.breakdown import Line, remark
from stepscope_report.sections.engines import PHASES, Engine, engine_times, shares_of
from stepscope_report.sections.health import (
    say_again,
    say_complete,
    say_deaths,
    say_ended,
    say_incomplete,
    say_others,
    say_recorder,
    say_span,
)
from stepscope_report.sections.idle import say_causes
from stepscope_report.sections.long_tail import slow_cells, tail_sentences, waits

FLOOR = 100
"""A finding is shown if its time is at least 1 / FLOOR of the step (1 %)."""
LINES = 40
"""The largest number of lines of a brief."""
_WIDTH = 400
_SIZES = ((7, 3), (5, 3), (3, 3), (3, 2), (2, 2))
"""Pairs (stages shown, advice shown), largest first. A brief uses the first pair that keeps it short
enough."""


class Briefed(ABC):
    """Base of objects with a brief, which a notebook shows as their value."""

    @abstractmethod
    def _parts(self) -> Sequence[Part]:
        """Return the parts of the brief."""

    def brief(self, *, markdown: bool = False) -> str:
        """Return the brief as text, in at most 40 lines."""
        parts = self._parts()
        return brief_markdown(parts) if markdown else brief_text(parts)

    def _repr_html_(self) -> str:
        return brief_html(self._parts())


class Part(msgspec.Struct, frozen=True):
    """Lines of a brief below one heading. A line that starts with two spaces explains the line before."""

    title: str
    lines: tuple[str, ...]

    def on_one_line(self) -> Part:
        """Return the part with each text on one line, and long texts cut."""
        lines = (plain(line) for line in self.lines)
        cut = (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ..." for line in lines)
        return Part(plain(self.title)[:_WIDTH], tuple(cut))


def step_brief(
    report: StepReport,
    folder: Path | None = None,
    others: Sequence[StepReport] = (),
    left_out: Mapping[str, Sequence[int]] = {},
) -> list[Part]:
    """Return the brief of one step. Its last part has the commands to run next.

    Args:
        folder: The step's folder, or None to name no command.
        others: Further steps of the run. The brief states only their number and the range of their durations.
        left_out: {id of another run in the folder: its steps that are left out}.
    """
    took = duration(report.breakdown.window_ns) if report.cause is None else report.cause.sentence
    took = "; ".join(filter(None, (say_deaths(report.health), took)))
    title = f"{report.name}, {moment(report.opened_ns)}: {took}"
    first = Part(title, tuple(_head(report, others)) + _elsewhere(report, left_out))
    last = (
        Part("Findings", tuple(_findings(report))),
        Part("Next", () if folder is None else tuple(_commands(report, folder))),
    )
    parts: list[Part] = []
    for stages, advice in _SIZES:
        middle = (
            Part("Where it went", tuple(_stages(report, stages))),
            Part("What to do", tuple(_advice(report, advice))),
        )
        parts = [first, *(part for part in (*middle, *last) if part.lines)]
        if sum(len(part.lines) + 2 for part in parts) <= LINES + 1:
            break
    return [part.on_one_line() for part in parts]


def run_brief(
    reports: Sequence[StepReport], folders: Mapping[int, Path], left_out: Mapping[str, Sequence[int]] = {}
) -> list[Part]:
    """Return the brief of the step that `read_first` chooses. The brief only counts the other steps.

    Args:
        folders: The folder of each step, by number.
        left_out: {id of another run in the folder: its steps, which `reports` leaves out}.
    """
    chosen, _ = read_first(reports)
    others = [report for report in reports if report is not chosen]
    return step_brief(chosen, folders.get(chosen.step), others, left_out)


def read_first(reports: Sequence[StepReport]) -> tuple[StepReport, str]:
    """Return (step to read first, reason in a few words): the last step that an exception or a process' death
    ended, else the longest.
    """
    for report in reversed(reports):
        if report.health.user_error is not None or say_deaths(report.health):
            return report, "it failed"
    return max(reports, key=lambda report: report.breakdown.window_ns), "it is the longest"


def brief_text(parts: Sequence[Part]) -> str:
    first, *rest = parts
    lines = [first.title, *first.lines]
    for part in rest:
        lines += ["", part.title, *(f"  {line}" for line in part.lines)]
    return "\n".join(lines)


def brief_markdown(parts: Sequence[Part]) -> str:
    """Return a brief as Markdown. Commands are code."""
    lines: list[str] = []
    for level, part in zip(("##", *("###" for _ in parts)), parts, strict=False):
        lines += ["", f"{level} {_markdown(part.title)}"]
        for line in part.lines:
            indent = "  " * line.startswith("  ")
            words = f"`{line.strip()}`" if part.title == "Next" else _markdown(line.strip())
            lines.append(f"{indent}- {words}")
    return "\n".join(lines[1:])


def brief_html(parts: Sequence[Part]) -> str:
    first, *rest = parts
    pieces = [f"<b>{escape(first.title)}</b>", *(f"<br>{escape(line)}" for line in first.lines)]
    for part in rest:
        lines = "\n".join(map(escape, part.lines))
        pieces.append(f'<br><b>{escape(part.title)}</b><pre style="white-space: pre-wrap">{lines}</pre>')
    return f"<div>{''.join(pieces)}</div>"


def _markdown(text: str) -> str:
    """Escape Markdown's special characters. An underscore inside a word stays, because Markdown
    prints it as it is.
    """
    return re.sub(r"([\\`*<\[|]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _elsewhere(report: StepReport, left_out: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    return (say_others(report.run_id, left_out),) if left_out else ()


def _head(report: StepReport, others: Sequence[StepReport]) -> Iterator[str]:
    health, breakdown = report.health, report.breakdown
    if others:
        took = [other.breakdown.window_ns for other in others]
        extent = " to ".join(dict.fromkeys((duration(min(took)), duration(max(took)))))
        why = read_first([*others, report])[1]
        rest = "the others" if len(others) > 1 else "the other"
        yield f"Chosen of {len(others) + 1:,} captured steps because {why}; {rest} took {extent}"
    yield say_complete(health) if health.complete else say_incomplete(health)
    yield from (f"Warning: {line}" for line in health.warnings[:1])
    if notes := [*filter(None, (say_recorder(health), say_ended(health), say_again(health)))]:
        yield ". ".join(notes)
    if not report.tracer:
        yield say_usual(report.baseline, report.compared)
    yield from filter(None, (say_beside(report.baseline),))
    if health.errors:
        yield f"{count(len(health.errors), 'error')}: {say_span(health.errors[0])}: {health.errors[0].error}"
    if breakdown.opening_ns + breakdown.closing_ns and not (report.baseline and report.baseline.cost_ns):
        cost = duration(breakdown.opening_ns + breakdown.closing_ns)
        yield f"Outside of the step, opening and closing the capture took {cost}"


def _stages(report: StepReport, most: int) -> Iterator[str]:
    breakdown = report.breakdown
    shares = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)
    lines = list(zip(breakdown.lines, shares, strict=True))
    stages = [entry for entry in lines if entry[0].kind == "stage" and entry[0].wall_ns]
    for line, share in stages[:most]:
        yield f"{share} % {line.role} {line.stage}{remark(line)}: {duration(line.wall_ns)}, {_alone(line)}"
    if rest := stages[most:]:
        wall_ns = sum(line.wall_ns for line, _ in rest)
        share = percent_of(wall_ns, breakdown.window_ns)
        yield f"{share} % {count(len(rest), 'other stage')}: {duration(wall_ns)}"
    for line, share in lines:
        if line.kind != "stage":
            yield f"{share} % {line.kind}: {duration(line.wall_ns)}"


def _alone(line: Line) -> str:
    if line.alone_ns >= line.wall_ns:
        return "nothing else ran"
    return f"{duration(line.alone_ns)} of it alone"


def _advice(report: StepReport, most: int) -> Iterator[str]:
    for advice in report.advice[:most]:
        yield from _remark(advice, report.breakdown.window_ns)
    if rest := report.advice[most:]:
        yield f"{len(rest)} more: {', '.join(advice.rule for advice in rest)}"
    if not report.advice:
        yield "No rule of advice applies"


def _remark(advice: Advice, window_ns: int) -> Iterator[str]:
    gain = f" (gains at most {savings(advice, window_ns)} of the step)" if advice.saves_ns else ""
    yield f"{'! ' if advice.kind == 'alarm' else ''}{advice.what}{gain} [{advice.rule}]"
    yield f"  {'; '.join(advice.because)}"
    yield f"  Try: {advice.do}"
    if advice.settings:
        yield f"  {'; '.join(map(say_change, advice.settings))}"


def _findings(report: StepReport) -> Iterator[str]:
    floor_ns = report.breakdown.window_ns / FLOOR
    if report.cause is not None:
        yield from (f"Also: {other.sentence}" for other in report.cause.others[:2])
    if report.long_tail is not None:
        yield from islice(tail_sentences(report.long_tail), 1)
        for slow in report.long_tail.worst[:1]:
            name, took, _ = slow_cells(slow)
            yield f"Slowest trajectory: {name}, {took}: {waits(slow)}"
    yield from engine_lines(report.engines)
    idle = [row for row in report.idle if row.idle_ns >= max(1, floor_ns)]
    if idle and report.breakdown.window_ns:
        row = max(idle, key=lambda row: row.idle_ns)
        share = percent_of(row.idle_ns, report.breakdown.window_ns)
        known = any(cause.kind != "not known" for cause in row.causes)
        causes = f"; it probably waited for {say_causes(row)}" if known else ""
        yield f"Most idle: {row.process}, {duration(row.idle_ns)}, {share} %{causes}"


def engine_lines(engines: Sequence[Engine]) -> Iterator[str]:
    """Yield a line for the engine with the least idle time, then a line for the engine with the most.

    A single engine has one line. An engine of unknown idle time counts as never idle.
    """
    ordered = sorted(engines, key=lambda row: row.idle_ns or 0)
    for engine in (*ordered[:1], *ordered[1:][-1:]):
        yield f"Engine {engine.replica}, {duration(engine.recorded_ns)} recorded: {_use(engine)}"


def _use(engine: Engine) -> str:
    shares = zip(PHASES, engine_times(engine), shares_of(engine), strict=True)
    used = (f"{phase} {share} %" for phase, ns, share in shares if ns)
    preempted = [] if not engine.preemptions else [count(engine.preemptions, "preemption")]
    return ", ".join((*used, *preempted)) or "no phases"


def _commands(report: StepReport, folder: Path) -> Iterator[str]:
    path = quote(str(folder))
    missing = "" if report.health.complete else ", and all that is missing"
    yield f"stepscope report {path} --full  # all tables{missing}"
    yield f"stepscope merge {path}  # its timeline, for Perfetto"
