"""The page of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope_report.accounting import Label
from stepscope_report.formatting import count, duration, moment, percentage, percents
from stepscope_report.html import Colours, Html, first_section, page, section, tag
from stepscope_report.model import StepReport
from stepscope_report.report import SECTIONS, pages_of
from stepscope_report.sections import GROUPS, OVERVIEW, RECORD, Page
from stepscope_report.sections.baseline import say_beside, say_usual
from stepscope_report.sections.breakdown import draw_when
from stepscope_report.sections.health import (
    Health,
    say_again,
    say_deaths,
    say_ended,
    say_incomplete,
    say_other_runs,
    say_recorder,
)
from stepscope_report.sections.stages import Stage
from stepscope_report.spans import few_names
from stepscope_report.timeline import Timeline

DOCS = "https://github.com/stepscope/stepscope/blob/main/docs/"


class Word(NamedTuple):
    name: str
    meaning: str
    place: str
    """File and heading in the docs that explain the word."""


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


def render_step(timeline: Timeline, report: StepReport) -> str:
    """Return the page of one step.

    Args:
        report: The report of `timeline`.
    """
    timeline, _ = few_names(timeline)
    groups = dict(_groups(_page(timeline, report)))
    firsts = {name: first_section("".join(parts)) for name, parts in groups.items()}
    return page(
        report.name,
        _head(timeline, report),
        *(part for parts in groups.values() for part in parts),
        groups={name: first for name, first in firsts.items() if first is not None},
    )


def _page(timeline: Timeline, report: StepReport) -> Page:
    waiting = [(stage.role, stage.stage) for stage in report.stages if stage.waits]
    return Page(timeline, report, Colours(_by_sight(report.stages), waiting))


def _groups(page: Page) -> Iterator[tuple[str, list[Html]]]:
    """Yield (name, sections as markup) for each group of sections that is not empty, in order."""
    drawn: list[list[Html]] = [[] for _ in GROUPS]
    drawn[OVERVIEW].append(draw_when(page))
    for part in SECTIONS:
        drawn[part.page] += part.html_of(page)
    for group, added in pages_of(page):
        drawn[min(max(group, OVERVIEW), RECORD)] += added
    drawn[RECORD].append(legend_of_words())
    yield from ((name, parts) for name, parts in zip(GROUPS, drawn, strict=True) if parts)


def _by_sight(stages: Sequence[Stage]) -> list[Label]:
    """Return the stages by the longest time that they take in one process, the longest first.

    That time is a stage's length in the charts. The stage's share of the step is shorter if the stage ran
    beside other stages.
    """
    seen: dict[Label, int] = {}
    for stage in stages:
        label, busy_ns = (stage.role, stage.stage), max(share.busy_ns for share in stage.processes)
        seen[label] = max(busy_ns, seen.get(label, 0))
    return sorted(seen, key=lambda label: (-seen[label], label))


def _head(timeline: Timeline, report: StepReport) -> Html:
    usual = (
        () if report.tracer else (say_usual(report.baseline, report.compared), say_beside(report.baseline))
    )
    title = report.name if report.tracer else f"Step {report.step}"
    run = "" if report.tracer else f"run {report.run_id}, "
    return tag(
        "header",
        tag("h1", title),
        tag("p", f"{run}{moment(report.opened_ns)}", class_="note"),
        tag("p", "; ".join(filter(None, (say_deaths(report.health), _headline(report)))), class_="headline"),
        tag("p", *_facts(timeline, report), class_="facts"),
        *_ended(report.health),
        *([tag("p", ". ".join(filter(None, usual)) + ".", class_="note")] if usual else []),
        *_others(report),
    )


def _ended(health: Health) -> list[Html]:
    """Return the notes in the head of the page: an early end of the capture, a step of the flight recorder,
    missing data, and a repeated capture.
    """
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


def _facts(timeline: Timeline, report: StepReport) -> Iterator[Html]:
    """Yield the facts in small print below the headline."""
    breakdown, health = report.breakdown, report.health
    state = health.state or "no manifest"
    if health.complete:
        yield tag("span", "complete", class_="good")
    else:
        reasons = f"{count(len(health.doubts), 'reason')}, manifest: {state}"
        yield tag("span", f"not complete ({reasons})", class_="bad")
    shares = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)
    yield tag("span", f"{shares[-1]} % unaccounted")
    hosts = len({process.host for process in health.processes})
    yield tag("span", f"{count(len(health.processes), 'process')} on {count(hosts, 'host')}")
    yield tag("span", count(len(timeline.spans), "span"))
    within = [p.clock.uncertainty_ns for p in health.processes if p.clock.uncertainty_ns is not None]
    if within:
        yield tag("span", f"clocks within ±{duration(max(within))}")
    unaligned = len(health.processes) - len(within)
    if unaligned:
        yield tag("span", f"{count(unaligned, 'process')} unaligned", class_="bad")
    if health.recorder is not None:
        yield tag("span", "written by the flight recorder")
    elif breakdown.total_ns != breakdown.window_ns:
        yield tag("span", f"{duration(breakdown.total_ns)} with opening and closing the capture")


def _headline(report: StepReport) -> str:
    """Return the cause of a slow step; without a cause, the step's duration and its largest stage."""
    if report.cause is not None:
        return report.cause.sentence
    breakdown, usual = report.breakdown, report.baseline
    text = duration(breakdown.window_ns)
    if usual is not None and usual.excess_ns is not None:
        steps = count(len(usual.steps), "uncaptured step")
        text += f", {percentage(usual.excess_ns, usual.p50_ns)} % against {steps}"
    largest = breakdown.lines[0]
    if largest.kind == "stage":
        share = percents([line.wall_ns for line in breakdown.lines], breakdown.window_ns)[0]
        text += f". Most of it: {largest.role} {largest.stage}, {share} %"
    return f"{text}."


def legend_of_words() -> Html:
    """Return the section that explains words, with links to the docs. No other part of the page links to the
    outside.
    """
    parts = list[Html]()
    for word in WORDS:
        link = tag("a", word.name, href=DOCS + word.place, rel="noreferrer")
        parts += tag("dt", link), tag("dd", word.meaning)
    return section("words", "Words", tag("dl", *parts))
