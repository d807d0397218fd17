"""Parents of spans across processes, causes of spans that have no carrier but name a request, and ends of
collectives of which only the begins are known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from stepscope.files.spans import BEGIN_ONLY, GROUP, REPLICA, SEQUENCE, SERVED, Open
from stepscope_report.timeline.model import Process, Span, Timeline

REQUEST = "request_id"
"""Attribute of spans with the engine's name for the request, set by both sides."""
CALLERS = frozenset({"trainer", "driver", "agent_loop", "env", "reward"})
"""Roles that call the replicas of the rollout and have no replicas themselves."""


def parents_of(records: Sequence[Sequence[Open]], keys: Sequence[str]) -> list[int | None]:
    """Return the index of each span's parent, counted through the records of all processes, or None for no
    parent.

    Args:
        records: The records of each process. A record's `parent` is in the same process; its `link` may lead
            to any process.
        keys: `ProcessInfo.key` of each process.
    """
    first, indices = 0, []
    for spans in records:
        indices.append({span.span: first + at for at, span in enumerate(spans)})
        first += len(spans)
    by_key: dict[str, Mapping[int, int]] = {}
    for key, index in zip(keys, indices, strict=True):
        by_key.setdefault(key, index)
    parents = [
        _parent(span, own, by_key) for spans, own in zip(records, indices, strict=True) for span in spans
    ]
    cut_cycles(parents)
    return parents


def _parent(span: Open, own: Mapping[int, int], by_key: Mapping[str, Mapping[int, int]]) -> int | None:
    if span.parent is not None:
        return own.get(span.parent)
    if span.link is None or span.link.process not in by_key:
        return None
    # A process numbers its spans once, so the link may be from a time when another step ran.
    return by_key[span.link.process].get(span.link.span)


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
    cause = makers[-1]  # the innermost span is the one that opened last
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
    """Return `Timeline.shared_numbers`. Such numbers occur if, for example, the engines of a student and of a
    teacher are both numbered from 0.
    """
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


_LEAST_NS = 1_000_000
"""Shortest wait in ns that counts. Clocks of processes differ, and a begin is noted a moment before the
call."""
_Thread: TypeAlias = tuple[int, int]
"""(process, thread)."""


def end_issued(spans: Sequence[Span], processes: Sequence[Process]) -> None:
    """Set, in place, ends, parents and roles of collectives without an end if other ranks waited for the rank
    that began last. Other such collectives keep zero length.
    """
    calls: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, span in enumerate(spans):
        if span.attrs is not None and BEGIN_ONLY in span.attrs and processes[span.process].aligned:
            calls[span.role, span.stage, span.attrs.get(GROUP), span.attrs.get(SEQUENCE)].append(at)
    threads = _Threads(spans) if calls else None
    for members in calls.values():
        last_ns = max(spans[at].start_ns for at in members)
        ranks = {processes[spans[at].process].info.rank for at in members}
        if threads is None or len(ranks) < len(members):
            continue  # several jobs have groups with the same name
        waiting = [at for at in members if threads.waits(at, last_ns)]
        for at in (*waiting, *(at for at in members if waiting and spans[at].start_ns == last_ns)):
            _end(spans, at, last_ns + 1, threads.around(at, last_ns))


def _end(spans: Sequence[Span], at: int, end_ns: int, parent: int | None) -> None:
    span = spans[at]
    span.end_ns, span.dur_ns, span.waits, span.parent = end_ns, end_ns - span.start_ns, True, parent
    if parent is not None:
        span.role = spans[parent].role


class _Threads:
    """The spans of each thread, and the moments at which something began or ended in it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._of: Mapping[_Thread, list[int]] = defaultdict(list)
        moments: dict[_Thread, set[int]] = defaultdict(set)
        for at, span in enumerate(spans):
            thread = span.process, span.thread
            self._of[thread].append(at)
            moments[thread] |= {span.start_ns} if span.end_ns is None else {span.start_ns, span.end_ns}
        self._moments = {thread: sorted(times) for thread, times in moments.items()}

    def waits(self, at: int, until_ns: int) -> bool:
        """Return whether a span's thread was blocked in a call from the span's begin to `until_ns`, for at
        least `_LEAST_NS`.

        A blocked thread is inside a call during all of this time, and no other span of the thread begins or
        ends.
        """
        span = self._spans[at]
        moments = self._moments[span.process, span.thread]
        is_still = bisect_right(moments, span.start_ns) == bisect_left(moments, until_ns)
        return until_ns - span.start_ns >= _LEAST_NS and is_still and self.around(at, until_ns) is not None

    def around(self, at: int, until_ns: int) -> int | None:
        """Return the innermost call of the span's thread that runs from the span's begin to `until_ns`, or
        None.
        """
        span = self._spans[at]
        around = (
            other
            for other in self._of[span.process, span.thread]
            if _runs(self._spans[other], span.start_ns, until_ns)
        )
        return max(around, key=lambda other: self._spans[other].start_ns, default=None)


def _runs(span: Span, start_ns: int, until_ns: int) -> bool:
    is_issued = span.attrs is not None and BEGIN_ONLY in span.attrs
    return not is_issued and span.start_ns <= start_ns and (span.end_ns is None or span.end_ns >= until_ns)
