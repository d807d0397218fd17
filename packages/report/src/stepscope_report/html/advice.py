"""Advice at the top of a step's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.advice.evidence import Advice
from stepscope_report.blocks.advice import savings, say_change
from stepscope_report.html.markup import EMPTY, Html, tag
from stepscope_report.html.page import section
from stepscope_report.section import Page


def draw_advice(advice: Sequence[Advice], page: Page) -> Iterator[Html]:
    """Yield the advice. Nothing if no rule speaks."""
    if advice:
        items = [_item(item, page.report.breakdown.window_ns) for item in advice]
        note = "Savings are upper bounds and do not add up."
        yield section("todo", "What to do", tag("ul", *items, class_="todo"), note=note)


def _item(advice: Advice, total_ns: int) -> Html:
    saves = savings(advice, total_ns)
    what = tag("b", advice.what, class_="bad" if advice.kind == "alarm" else None)
    because = tag("div", "; ".join(advice.because), class_="note")
    bound = tag("b", saves, class_="saves") if saves else EMPTY
    settings = (tag("div", tag("code", say_change(change))) for change in advice.settings)
    return tag("li", bound, what, because, tag("div", advice.do), *settings, class_=advice.kind)
