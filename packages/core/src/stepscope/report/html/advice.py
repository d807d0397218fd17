"""What to do about a step, at the top of its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.formatting import duration, percents
from stepscope.report.html.markup import EMPTY, Html, tag
from stepscope.report.html.page import section
from stepscope.report.tables.advice import Advice


def todo(advice: Sequence[Advice], total_ns: int) -> Iterator[Html]:
    """Nothing where no rule speaks."""
    if advice:
        items = [_item(each, total_ns) for each in advice]
        note = "Savings are upper bounds and do not add up."
        yield section("todo", "What to do", tag("ul", *items, class_="todo"), note=note)


def _item(each: Advice, total_ns: int) -> Html:
    saves = EMPTY
    if each.saves_ns:
        (share,) = percents([min(each.saves_ns, total_ns)], total_ns)
        saves = tag("b", f"{duration(each.saves_ns)}, {share} %", class_="saves")
    what = tag("b", each.what, class_="bad" if each.kind == "alarm" else None)
    because = tag("div", "; ".join(each.because), class_="note")
    return tag("li", saves, what, because, tag("div", each.do), class_=each.kind)
