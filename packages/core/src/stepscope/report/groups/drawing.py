"""Groups of calls as tables, for the terminal, as Markdown, and on a page with a choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks.block import TextTable
from stepscope.report.formatting import duration, percents
from stepscope.report.groups.grouping import Group, Grouping
from stepscope.report.html.markup import Html, tag
from stepscope.report.html.page import section, table

_NOTE = (
    "A call includes those below it. total: a sum. active: while at least one ran. %: active, of the step."
)


def group_table(grouping: Grouping, title: str = "") -> TextTable:
    """Return the groups as one table."""
    extra = [name for name in ("open", "errors") if any(getattr(group, name) for group in grouping.groups)]
    heads = (
        ">calls",
        *(f">{name}" for name in extra),
        ">total",
        ">mean",
        ">p50",
        ">p95",
        ">max",
        ">active",
        ">%",
    )
    shares = _shares(grouping)
    rows = tuple(
        (
            group.value,
            f"{group.calls:,}",
            *(str(getattr(group, name) or "") for name in extra),
            *_times(group),
            share,
        )
        for group, share in zip(grouping.groups, shares, strict=True)
    )
    columns = (grouping.attribute, *heads)
    return TextTable(title or f"By {grouping.attribute}", columns, rows, _NOTE, "value")


def _shares(grouping: Grouping) -> list[str]:
    # One by one: parts that overlap do not make up the step.
    return [percents([group.active_ns], grouping.window_ns)[0] for group in grouping.groups]


def _times(group: Group) -> tuple[str, ...]:
    times = (group.total_ns, group.mean_ns, group.p50_ns, group.p95_ns, group.max_ns, group.active_ns)
    return tuple(map(duration, times))


def draw_groups(groupings: Sequence[Grouping]) -> Iterator[Html]:
    """Yield a section with a table for each grouping, of which the page's script shows the chosen one."""
    if groupings:
        parts = [
            tag("div", *_part(grouping), class_="choice", data_choice=grouping.attribute)
            for grouping in groupings
        ]
        yield section("groups", "Calls by attribute", *parts, note=_NOTE)


def _part(grouping: Grouping) -> tuple[Html, Html]:
    block = group_table(grouping)
    return tag("h3", block.title), table(block.columns, block.rows)
