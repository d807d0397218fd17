"""Parents of spans across processes, and causes of spans without a carrier by the names of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stepscope.files.spans import REPLICA, SERVED, Open
from stepscope_report.timeline.model import Span, Timeline

REQUEST = "request_id"
"""Attribute of spans with the engine's name for the request, set by both sides."""
CALLERS = frozenset({"trainer", "driver", "agent_loop", "env", "reward"})
"""Roles that call the replicas of the rollout and have no replicas themselves."""


def parents_of(records: Sequence[Sequence[Open]], keys: Sequence[str], step: int) -> list[int | None]:
    """Return the index of each span's parent, counted through the records of all processes, or None for no
    parent.

    Args:
        records: The records of each process. A record's `parent` is in the same process; its `link` may lead
            to any process.
        keys: `ProcessInfo.key` of each process.
        step: Number of the step. A link to a span of another step gives no parent.
    """
    first, indices = 0, []
    for spans in records:
        indices.append({span.span: first + at for at, span in enumerate(spans)})
        first += len(spans)
    by_key: dict[str, Mapping[int, int]] = {}
    for key, index in zip(keys, indices, strict=True):
        by_key.setdefault(key, index)
    parents = [
        _parent(span, own, by_key, step)
        for spans, own in zip(records, indices, strict=True)
        for span in spans
    ]
    cut_cycles(parents)
    return parents


def _parent(
    span: Open, own: Mapping[int, int], by_key: Mapping[str, Mapping[int, int]], step: int
) -> int | None:
    if span.parent is not None:
        return own.get(span.parent)
    link = span.link
    if link is None or link.step not in (None, step) or link.process not in by_key:
        return None
    return by_key[link.process].get(link.span)


def cut_cycles(parents: list[int | None]) -> None:
    """Cut every cycle of parents at one span. Only damaged files hold cycles."""
    done = bytearray(len(parents))
    for start in range(len(parents)):
        path: list[int] = []
        at: int | None = start
        while at is not None and not done[at]:
            done[at] = 1
            path.append(at)
            at = parents[at]
        if at is not None and done[at] == 1:
            parents[path[-1]] = None
        for index in path:
            done[index] = 2


def requests(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Yield (span that made a request, span that served the request in another process), by index.

    The process that made a request is the only one that names the request inside a trajectory. If no process
    or several processes do so, nothing is yielded. An overlap in time is no evidence.
    """
    named: dict[object, list[int]] = {}
    for index, span in enumerate(timeline.spans):
        if span.attrs is not None and (name := span.attrs.get(REQUEST)) is not None:
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


def shared_numbers(timeline: Timeline) -> frozenset[tuple[str, int]]:
    """Return `Timeline.shared_numbers`: a student's engines and a teacher's may each be numbered from 0."""
    roles: dict[int, set[str]] = defaultdict(set)
    for span in timeline.spans:
        if span.role == "rollout" and span.stage in SERVED:
            number, role = replica_and_role(timeline, span)
            if number is not None:
                roles[number].add(role)
    return frozenset(
        (role, number)
        for number, own in roles.items()
        for role in own - {"rollout" if "rollout" in own else min(own)}
    )


def replica_and_role(timeline: Timeline, span: Span) -> tuple[int | None, str]:
    """Return (number, role) of the replica that a span belongs to.

    The number comes from the nearest span that names a replica, or else from the process. The role comes from
    the outermost span that names a number. If this is a caller's role and the process is a replica, the role
    is the process' role.
    """
    process, number, role = timeline.processes[span.process], None, "rollout"
    around: Span | None = span
    while around is not None:
        value = (around.attrs or {}).get(REPLICA)
        if isinstance(value, int) and not isinstance(value, bool):
            number, role = value if number is None else number, around.role
        around = None if around.parent is None else timeline.spans[around.parent]
    if (role in CALLERS or role == "rollout") and process.is_replica:
        role = process.info.role
    return process.info.replica if number is None else number, "rollout" if role in CALLERS else role
