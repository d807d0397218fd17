"""Causes of spans by the names of requests, for spans without a carrier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.timeline.model import Span, Timeline

ATTRIBUTE = "request_id"
"""Attribute of spans with the engine's name for the request, set by both sides."""


def requests(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Yield pairs of spans by index: the one that made a request, and one that served it elsewhere.

    The maker is the only process that names the request in a trajectory of its own. If no process or several
    processes do so, nothing is yielded. An overlap in time is no evidence.
    """
    named: dict[object, list[int]] = {}
    for index, span in enumerate(timeline.spans):
        if span.attrs is not None and (name := span.attrs.get(ATTRIBUTE)) is not None:
            named.setdefault(name, []).append(index)
    for members in named.values():
        yield from _of_one(timeline.spans, members)


def _of_one(spans: Sequence[Span], members: Sequence[int]) -> Iterator[tuple[int, int]]:
    linked = {index for index in members if _is_below(spans, index)}
    makers = [index for index in members if spans[index].trajectory is not None and index not in linked]
    if len({spans[index].process for index in makers}) != 1:
        return
    cause = makers[-1]  # the innermost: it opened last
    for index in members:
        if spans[index].process != spans[cause].process and not _has_cause(spans, index, members):
            yield cause, index


def _is_below(spans: Sequence[Span], index: int) -> bool:
    """Return whether a carrier already links the span to another process."""
    at: int | None = index
    while at is not None:
        if spans[at].process != spans[index].process:
            return True
        at = spans[at].parent
    return False


def _has_cause(spans: Sequence[Span], index: int, members: Sequence[int]) -> bool:
    """Return whether a carrier links the span, or another span of the request contains it."""
    above = spans[index].parent
    while above is not None:
        if above in members or spans[above].process != spans[index].process:
            return True
        above = spans[above].parent
    return False
