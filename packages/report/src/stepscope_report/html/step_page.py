"""One step's page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepscope_report.accounting import Label
from stepscope_report.added import pages_of
from stepscope_report.formatting import count, duration, moment, percentage, percents
from stepscope_report.groups import choices_of, draw_groups
from stepscope_report.html.colours import Colours
from stepscope_report.html.markup import Html, tag
from stepscope_report.html.page import page, section
from stepscope_report.model import StepReport
from stepscope_report.report import SECTIONS
from stepscope_report.section import BEHIND, Page, StepFile
from stepscope_report.sections.baseline import say_beside, say_usual
from stepscope_report.sections.health import (
    Health,
    say_again,
    say_ended,
    say_incomplete,
    say_other_runs,
    say_recorder,
)
from stepscope_report.sections.stages import Stage
from stepscope_report.spans import few_names
from stepscope_report.timeline import Timeline

__all__ = ["StepFile", "render_step"]

DOCS = "https://github.com/stepscope/stepscope/blob/main/docs/"


class Word(NamedTuple):
    name: str
    meaning: str
    place: str
    """File and heading in the docs."""


WORDS = (
    Word("wall", "a stage's share of the step; the shares add up to the step", "report.md#where-it-went"),
    Word("alone", "the part of wall that no other stage shared", "report.md#how-time-is-split"),
    Word("active", "how long a stage ran, also hidden behind others", "report.md#where-it-went"),
    Word("profiler", "time that profilers took inside the step", "report.md#where-it-went"),
    Word("unaccounted", "time in which no span ran in any process", "report.md#where-it-went"),
    Word("opening, closing", "time of the capture itself, outside of the step", "report.md#where-it-went"),
    Word("uncaptured", "steps near this one that were not captured", "report.md#beside-uncaptured-steps"),
    Word("busy", "at least one call ran in the process", "report.md#busy-time-by-process"),
    Word("idle", "no call ran in the process, by the probable cause", "report.md#idle"),
    Word("long tail", "the last trajectories, for which the others wait", "report.md#long-tail"),
    Word("staleness", "steps or policy versions that a trajectory lies behind", "report.md#staleness"),
    Word(
        "exposed", "communication not hidden by computation", "report.md#operators-and-kernels-devices-memory"
    ),
    Word("clocks within", "the largest error of a process' clock", "timeline.md#clocks"),
    Word("unaligned", "of a process whose clock is not known", "timeline.md#clocks"),
    Word("role, stage, span", "who works, what is done, and one timed piece of it", "glossary.md"),
)


def render_step(timeline: Timeline, report: StepReport, files: Sequence[StepFile] = ()) -> str:
    """Return the page of one step. `files` are the files that it links to; none is read.

    Args:
        report: Of the same timeline.
    """
    timeline, _ = few_names(timeline)
    return page(f"Step {report.step}, run {report.run_id}", *_parts(timeline, report, files))


def _parts(timeline: Timeline, report: StepReport, files: Sequence[StepFile]) -> Iterator[Html]:
    waiting = [(stage.role, stage.stage) for stage in report.stages if stage.waits]
    page = Page(timeline, report, Colours(_by_sight(report.stages), waiting), files)
    yield _head(timeline, report)
    parts: list[tuple[int, Iterable[Html]]] = [(section.page, section.html_of(page)) for section in SECTIONS]
    parts.append((BEHIND, draw_groups(choices_of(timeline))))
    for _, drawn in sorted([*parts, *pages_of(page)], key=lambda part: part[0]):
        yield from drawn
    yield legend_of_words()


def _by_sight(stages: Sequence[Stage]) -> list[Label]:
    """Return the stages, the one with the longest visible time in the charts first.

    Their share would not do: much of that time is split among stages.
    """
    seen: dict[Label, int] = {}
    for stage in stages:
        label, busy_ns = (stage.role, stage.stage), max(share.busy_ns for share in stage.processes)
        seen[label] = max(busy_ns, seen.get(label, 0))
    return sorted(seen, key=lambda label: (-seen[label], label))


def _head(timeline: Timeline, report: StepReport) -> Html:
    usual = (say_usual(report.baseline), say_beside(report.baseline))
    return tag(
        "header",
        tag("h1", f"Step {report.step}"),
        *([] if report.cause is None else [tag("p", report.cause.sentence, class_="said")]),
        tag("p", f"run {report.run_id}, {moment(report.opened_ns)}", class_="note"),
        tag("div", *(_fact(*fact) for fact in _facts(timeline, report)), class_="facts"),
        *_ended(report.health),
        tag("p", ". ".join(filter(None, usual)) + ".", class_="note"),
        *_others(report),
    )


def _ended(health: Health) -> list[Html]:
    """Return the notes on an early end of the capture, which a reader must know before anything below."""
    ended, again = say_ended(health), say_again(health)
    incomplete = say_incomplete(health)
    parts = [tag("p", ended, class_="said bad")] if ended else []
    recorded = say_recorder(health)
    if recorded:
        parts.append(tag("p", f"{recorded}.", class_="said"))
    if incomplete:
        link = tag("a", "What is missing", href="#complete")
        parts.append(tag("p", f"{incomplete}. ", link, class_="said bad"))
    if again:
        parts.append(tag("p", again, class_="note"))
    return parts


def _others(report: StepReport) -> list[Html]:
    note = say_other_runs(report)
    return [tag("p", note, class_="note")] if note else []


def _facts(timeline: Timeline, report: StepReport) -> Iterator[tuple[str, str, str, str]]:
    """Yield (what, value, remark, class) for the boxes in the head."""
    breakdown, health = report.breakdown, report.health
    yield (
        "step",
        duration(breakdown.window_ns),
        f"{duration(breakdown.total_ns)} with opening and closing the capture"
        if health.recorder is None
        else "written by the flight recorder",
        "",
    )
    usual = report.baseline
    if usual is not None:
        excess = (
            "" if usual.excess_ns is None else f"; this one {percentage(usual.excess_ns, usual.p50_ns)} %"
        )
        yield "uncaptured", duration(usual.p50_ns), f"median of {len(usual.steps)}{excess}", ""
    lines = breakdown.lines
    shares = percents([line.wall_ns for line in lines], breakdown.window_ns)
    if lines[0].kind == "stage":
        yield "largest stage", f"{shares[0]} %", f"{lines[0].role} {lines[0].stage}, of all", ""
    yield "unaccounted", f"{shares[-1]} %", "no span ran", ""
    hosts = len({process.host for process in health.processes})
    within = [p.clock.uncertainty_ns for p in health.processes if p.clock.uncertainty_ns is not None]
    remark = f"on {count(hosts, 'host')}, {count(len(timeline.spans), 'span')}"
    yield "processes", f"{len(health.processes):,}", remark, ""
    unaligned = len(health.processes) - len(within)
    scope = f"{count(unaligned, 'process')} unaligned" if unaligned else "of every process, at most"
    yield "clocks within", f"±{duration(max(within, default=None))}", scope, "bad" if unaligned else ""
    yield "state", *_state(health)


def _state(health: Health) -> tuple[str, str, str]:
    state = health.state or "no manifest"
    if health.complete:
        return "complete", f"manifest: {state}", "good"
    return "not complete", f"{count(len(health.doubts), 'reason')} below; manifest: {state}", "bad"


def _fact(what: str, value: str, remark: str, kind: str) -> Html:
    return tag(
        "div", tag("small", what), tag("b", value, class_=kind or None), tag("small", remark), class_="fact"
    )


def legend_of_words() -> Html:
    """Return the section that explains words. Only its links leave the page."""
    parts = list[Html]()
    for word in WORDS:
        link = tag("a", word.name, href=DOCS + word.place, rel="noreferrer")
        parts += tag("dt", link), tag("dd", word.meaning)
    return section("words", "Words", tag("dl", *parts))
