"""The legend of words: those that a page uses, each with a link to the docs."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.report.html.markup import Html, tag
from stepscope.report.html.page import section

DOCS = "https://github.com/stepscope/stepscope/blob/main/docs/"


class Word(NamedTuple):
    """A word of the page."""

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


def legend_of_words() -> Html:
    """Return the section, whose links are the only ones that leave the page."""
    parts = list[Html]()
    for word in WORDS:
        link = tag("a", word.name, href=DOCS + word.place, rel="noreferrer")
        parts += tag("dt", link), tag("dd", word.meaning)
    return section("words", "Words", tag("dl", *parts))
