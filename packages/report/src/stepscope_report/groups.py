"""Times of a step's calls, grouped by an attribute of their spans, such as the tool or the environment.

The tables are for the terminal, and for Markdown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from stepscope.files.spans import MOST_NAMES, OTHER_NAMES, PROFILING
from stepscope_report.accounting import clipped, rank_of, union_ns
from stepscope_report.formatting import duration, percent_of
from stepscope_report.spans import is_tool, placed
from stepscope_report.table import TextTable
from stepscope_report.timeline import Span, Timeline

ALWAYS = ("name", "tool", "env", "role", "stage", "process")
"""Attributes that a span need not state, because a suitable field of the span can give the value."""
_LENGTH = 80
_TIMES = (">total", ">mean", ">p50", ">p95", ">max", ">active")
_NOTE = (
    "A call includes those below it. total: a sum. active: while at least one ran. %: active, of the step."
)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All calls with one value of the attribute. Times of calls are None if no call has ended."""

    value: str
    calls: int
    """Number of calls that ended."""
    open: int
    """Number of calls without a recorded end. Their time counts only in `active_ns`, up to the last sign of
    life."""
    errors: int
    cancelled: int
    """Number of cancelled calls, which `errors` does not count."""
    total_ns: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    max_ns: int | None
    active_ns: int
    """Time of the step in ns in which at least one of the calls ran."""


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one step, grouped by one attribute, the longest total first. Groups beyond the 50th are
    united.
    """

    attribute: str
    window_ns: int
    """Duration of the step, of which `active_ns` is a part."""
    groups: tuple[Group, ...]


def group_spans(timeline: Timeline, attribute: str) -> Grouping:
    """Return the spans that state the attribute, grouped by its value. `groups` is empty if
    no span states it.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        value = None if span.stage == PROFILING else _value(timeline, span, attribute)
        if value is not None:
            spans[value].append(span)
    ranked = sorted(spans, key=lambda value: (-sum(span.dur_ns or 0 for span in spans[value]), value))
    groups = [_group(timeline, value, spans[value]) for value in ranked[:MOST_NAMES]]
    others = [span for value in ranked[MOST_NAMES:] for span in spans[value]]
    if others:
        groups.append(_group(timeline, OTHER_NAMES, others))
    return Grouping(attribute=attribute, window_ns=timeline.window.wall_ns, groups=tuple(groups))


def attributes_of(timeline: Timeline) -> list[str]:
    """Return the attributes that spans of the step state, the most frequent attribute first."""
    counts = Counter(name for span in timeline.spans for name in span.attrs or ())
    return sorted(counts, key=lambda name: (-counts[name], name))


def _value(timeline: Timeline, span: Span, attribute: str) -> str | None:
    stated = (span.attrs or {}).get(attribute)
    if stated is None and attribute in ALWAYS:
        stated = _implied(timeline, span, attribute)
    if stated is None:
        return None
    text = str(stated).lower() if isinstance(stated, bool) else str(stated)
    return " ".join(text.split())[:_LENGTH] or None


def _implied(timeline: Timeline, span: Span, attribute: str) -> str | None:
    named = str((span.attrs or {}).get("name") or span.stage)
    if attribute == "name":
        return named
    if attribute == "tool":
        return named if is_tool(span.role, span.stage) else None
    if attribute == "env":
        return named if span.role == "env" else None
    if attribute == "role":
        return span.role
    return f"{span.role} {span.stage}" if attribute == "stage" else timeline.processes[span.process].name


def _group(timeline: Timeline, value: str, spans: Sequence[Span]) -> Group:
    times = sorted(span.dur_ns for span in spans if span.dur_ns is not None)
    window = timeline.window
    return Group(
        value=value,
        calls=len(times),
        open=len(spans) - len(times),
        errors=sum(span.error is not None for span in spans),
        cancelled=sum(span.cancelled for span in spans),
        total_ns=sum(times),
        mean_ns=round(sum(times) / len(times)) if times else None,
        p50_ns=times[rank_of(50, len(times))] if times else None,
        p95_ns=times[rank_of(95, len(times))] if times else None,
        max_ns=times[-1] if times else None,
        active_ns=union_ns(clipped(placed(timeline, spans), window.start_ns, window.end_ns)),
    )


def group_table(grouping: Grouping, title: str) -> TextTable:
    states = ("open", "errors", "cancelled")
    extra = [name for name in states if any(getattr(group, name) for group in grouping.groups)]
    heads = (">calls", *(f">{name}" for name in extra), *_TIMES, ">%")
    rows = tuple(
        (
            group.value,
            f"{group.calls:,}",
            *(str(getattr(group, name) or "") for name in extra),
            *_times(group),
            percent_of(group.active_ns, grouping.window_ns),  # groups overlap, so the sum is not 100 %
        )
        for group in grouping.groups
    )
    columns = (grouping.attribute, *heads)
    return TextTable(title, columns, rows, _NOTE, "value")


def _times(group: Group) -> tuple[str, ...]:
    times = (group.total_ns, group.mean_ns, group.p50_ns, group.p95_ns, group.max_ns, group.active_ns)
    return tuple(map(duration, times))
