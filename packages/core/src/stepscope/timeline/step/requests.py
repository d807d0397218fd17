"""Causes of spans by the names of requests, for spans without a carrier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.timeline.model import Span, Timeline

ATTRIBUTE = "request_id"
"""An attribute of spans: what the engine calls the request, on both sides."""


def requests(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """(cause, effect), as indices of spans: from who made a request to those who served it elsewhere.

    The maker is the one process that names the request in a trajectory of its own. Where two processes could
    have made it, or none, nothing is known. That two spans overlap in time is no knowledge either.
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
    """Whether a carrier says what caused it, somewhere else."""
    at: int | None = index
    while at is not None:
        if spans[at].process != spans[index].process:
            return True
        at = spans[at].parent
    return False


def _has_cause(spans: Sequence[Span], index: int, members: Sequence[int]) -> bool:
    """By a carrier, or as a part of another span of the request."""
    above = spans[index].parent
    while above is not None:
        if above in members or spans[above].process != spans[index].process:
            return True
        above = spans[above].parent
    return False
